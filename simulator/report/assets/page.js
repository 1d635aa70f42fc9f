"use strict";
(() => {
  // Neutral colours of the figures, exchanged for the page's own (dark screens, print).
  const neutral = { "#24292f": "--ink", "#d7dbe0": "--grid", "#ffffff": "--surface" };
  const plots = [...document.querySelectorAll(".plot")];

  const spec = (plot) => {
    const style = getComputedStyle(document.documentElement);
    let text = document.getElementById(plot.id + "-data").textContent;
    for (const [colour, name] of Object.entries(neutral)) {
      text = text.replaceAll('"' + colour + '"', '"' + style.getPropertyValue(name).trim() + '"');
    }
    return JSON.parse(text);
  };

  const hidden = (plot) => {
    const buttons = document.querySelectorAll('[data-plot="' + plot.id + '"][aria-pressed="false"]');
    return new Set([...buttons].map((button) => button.dataset.trace));
  };

  const draw = (plot) => {
    const { data, layout, config } = spec(plot);
    const off = hidden(plot);
    for (const trace of data) {
      if (off.has(trace.name)) trace.visible = false;
    }
    // A page that hides its figure would measure 0: the container decides.
    return Plotly.react(plot, data, layout, config);
  };

  const drawAll = () => plots.forEach(draw);
  drawAll();

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  matchMedia("print").addEventListener("change", drawAll);

  document.addEventListener("click", (event) => {
    const button = event.target.closest(".legend button");
    if (!button) return;
    button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") === "false"));
    const plot = document.getElementById(button.dataset.plot);
    const off = hidden(plot);
    const index = plot.data.map((_, i) => i).filter((i) => plot.data[i].name !== undefined);
    Plotly.restyle(plot, { visible: index.map((i) => !off.has(plot.data[i].name)) }, index);
  });
})();
