"""``docs/accuracy.md`` from the figures of :mod:`benchmarks.accuracy`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from simulator.report.words import time_label

_HEAD = """\
# How far predictions can be trusted

Written by `make accuracy DATA=DIR` (`python -m benchmarks.accuracy --data DIR --folds --doc
docs/accuracy.md`), where `DIR` holds the public measured tables in the format of
`gpumix validate`. The tables themselves are not part of the project; [sources](#sources) says
where each comes from. Errors are (predicted - measured) / measured; MAPE is the mean of their
absolute values, bias their median. "In p10-p90" is the share of measurements inside the predicted
range, which is meant to hold 80 %.
"""

#: Table -> (where it is from, what published predictors report on the same or like runs).
SOURCES: dict[str, tuple[str, str]] = {
    "vtrain_single": ("github.com/VIA-Research/vTrain `data/`, 2-8 A100, small GPT",
                      "vTrain 8.4 % after profiling that GPU (arXiv 2312.12391)"),
    "vtrain_multi": ("same; 64 and 512 A100", "vTrain 14.7 %"),
    "llm_foundry": ("github.com/mosaicml/llm-foundry `scripts/train/benchmarking`",
                    "none expresses FSDP here"),
    "megatron_2205_05198": ("arXiv 2205.05198 table 5", "Calculon 3.65 %, tuned on these rows"),
    "megatron_2104_04473": ("arXiv 2104.04473 table 1", ""),
    "dgxc_h100": ("github.com/NVIDIA/dgxc-benchmarking v25.02", ""),
    "torchtitan": ("github.com/pytorch/torchtitan `benchmarks/`, `docs/performance`", ""),
    "nemo_h100_fp8": ("NVIDIA NeMo 24.07 performance page", ""),
    "b200": ("github.com/MooreThreads/SimuMax `docs/b200`",
             "SimuMax time -13.5 to +0.1 %, memory -1.4 to -0.1 %, with a measured system file"),
    "sailor_gh200": ("github.com/eth-easl/sailor `Planner/simulations/validation`",
                     "Sailor time 6 %, memory 5.6 %, with profiles of the model"),
    "amp_t4": ("results of arXiv 2210.07297, 16 T4",
               "AMP rank correlation 0.93, regret of its choice 10 %"),
}  # fmt: skip

#: What a source's rows don't say or contradict.
REMARKS = (
    "`vtrain_single` names neither the A100's memory size nor the vocabulary: 80 GB and 51,200 are "
    "taken.",
    "`sailor_gh200` names neither precision nor fabric, and logs device memory: bf16 with fp32 "
    "gradients and the usual InfiniBand are taken, and its peaks are compared with device memory.",
    "`torchtitan` ran H100 96 GB cards capped at 500 W; they are a GPU of their own in the "
    "database.",
    "`megatron_2104_04473` prints no micro-batch: the fastest that fits is taken, as its authors "
    "did.",
    "`amp_t4` has five runs that failed, published as failed for memory or otherwise.",
    "`llm_foundry` and `vtrain_*` are of 2022 and 2023 software; the same stack of another year "
    "has other kernels and host times, and one calibration for each stack and GPU has to serve "
    "both.",
)


#: What leaving rows out of a fit does not undo.
_CHOSEN_BY_HAND = """\
"Held out" covers the fitted factors only. The model's form and several constants were chosen by
hand with these tables in view, so the figures below are kinder than those of a run nobody has
looked at: launches per tensor-parallel collective and megatron-deepspeed's launch time
(vtrain_single), passes of the fused softmax (the unfused-attention tables together), bytes of
the loss, the fit's bounds and priors, GPUs with transferred rates as a group of their own
(after seeing b200), and most memory constants. The in-sample table above is no evidence for
unseen runs.
"""


def page(figures: dict[str, Any]) -> str:
    """The page as text, the same for the same figures."""
    parts = [
        _HEAD,
        "## Step time\n", _time_table(figures),
        "## Held-out rows\n", _CHOSEN_BY_HAND, *_folds(figures.get("folds")),
        "## Rankings\n", _rankings(figures["rankings"]),
        "## Memory\n", _memory(figures["sources"]),
        "## Running out of memory\n", _oom(figures["oom"]),
        *(["## Layers\n", _layers(figures["layers"])] if "layers" in figures else []),
        "## The ten worst rows\n", _worst(figures["worst"]),
        "## Sources\n", _sources(figures["sources"]),
        "\n".join(f"- {text}" for text in REMARKS) + "\n",
        "Single kernels: [kernels.md](kernels.md). Collectives: [network.md](network.md).\n",
    ]  # fmt: skip
    return "\n".join(parts)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(columns)} |", f"| {' | '.join('---' for _ in columns)} |"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _percent(value: float | None, *, signed: bool = False) -> str:
    if value is None:
        return ""
    return f"{100 * value:+.1f} %" if signed else f"{100 * value:.1f} %"


def _time_table(figures: dict[str, Any]) -> str:
    held = figures.get("folds", {}).get("source", {})
    rows = []
    for name, s in (*figures["sources"].items(), ("all", figures["all"])):
        t = s["time"]
        if not t["n"]:
            continue
        rows.append([
            name, f"{s['rows']:,}", str(s["rows"] - s["expressed"]), f"{t['n']:,}",
            *(_percent(t[k]) for k in ("mape", "median_ape", "p90_ape")),
            _percent(t["bias"], signed=True), _percent(t["coverage"]),
            _percent(held.get(name, {}).get("mape")), SOURCES.get(name, ("", ""))[1],
        ])  # fmt: skip
    return table(
        ["table", "rows", "not expressed", "timed", "MAPE", "median", "90 %", "bias",
         "in p10-p90", "MAPE, source left out", "published predictors"], rows,
    )  # fmt: skip


def _folds(folds: dict[str, Any] | None) -> list[str]:
    if not folds:
        return ["Not computed in this run (`--folds`).\n"]
    pieces = []
    for label, words in (("source", "table"), ("gpu", "GPU")):
        rows = [
            [name, f"{s['n']:,}", _percent(s["mape"]), _percent(s["median_ape"]),
             _percent(s["p90_ape"]), _percent(s["bias"], signed=True)]
            for name, s in folds[label].items()
        ]  # fmt: skip
        head = [f"{words} left out", "rows", "MAPE", "median", "90 %", "bias"]
        pieces += [f"Fitted without the {words}'s rows, scored on them:\n", table(head, rows)]
    return pieces


def _rankings(rankings: dict[str, Any]) -> str:
    rows = [
        [name, str(r["groups"]), str(r["plans"]), f"{r['spearman']:.3f}",
         f"{r['spearman_worst']:.3f}", _percent(r["regret"]), _percent(r["regret_worst"])]
        for name, r in rankings.items()
    ]  # fmt: skip
    text = (
        "Groups of ten plans or more of one model on one cluster, ranked by tokens per second. "
        "Regret: how much slower the plan ranked first is than the best measured one.\n\n"
    )
    return text + table(
        ["table", "groups", "plans", "rank correlation, median", "worst", "regret, median",
         "worst"], rows,
    )  # fmt: skip


def _memory(sources: dict[str, Any]) -> str:
    rows = []
    for name, s in sources.items():
        for key, words in (("memory", "allocated"), ("memory_reserved", "reserved")):
            m = s[key]
            if m["n"]:
                rows.append([
                    name, "device" if name.startswith("sailor") else words, str(m["n"]),
                    *(_percent(m[k]) for k in ("mape", "median_ape", "p90_ape")),
                    _percent(m["bias"], signed=True), _percent(m["coverage"]),
                ])  # fmt: skip
    return table(["table", "peak", "rows", "MAPE", "median", "90 %", "bias", "in p10-p90"], rows)


def _oom(oom: dict[str, Any]) -> str:
    names = {"at_50_percent": "risk over 50 %", "at_10_percent": "risk over 10 %",
             "eighty_percent_rule": "80 % rule of arXiv 2411.06465"}  # fmt: skip
    keys = ("true_ooms", "false_fits", "true_fits", "false_ooms")
    rows = [[words, *(f"{oom[key][k]:,}" for k in keys)] for key, words in names.items()]
    confusion = table(
        ["said to run out", "failed, foreseen", "failed, missed", "trained, foreseen",
         "trained, false alarm"], rows,
    )  # fmt: skip
    bins = [
        [f"{100 * b['from']:.0f}-{100 * b['to']:.0f} %", f"{b['n']:,}",
         f"{100 * b['predicted']:.2f} %", f"{100 * b['failed']:.2f} %"]
        for b in oom["calibration"]
    ]  # fmt: skip
    reliability = table(["predicted risk", "rows", "mean prediction", "share that failed"], bins)
    text = f"{oom['n']:,} rows with a known outcome, {oom['failed']} failed. "
    return f"{text}Brier score {oom['brier']:.4f}.\n\n{confusion}\n{reliability}"


def _layers(layers: dict[str, Any]) -> str:
    unseen = layers["unseen"]["by_gpu"]
    rows = [
        [gpu, f"{s['n']:,}", _percent(s["median_ape"]), _percent(s["p90_ape"]),
         _percent(s["bias"], signed=True), _percent(unseen.get(gpu, {}).get("median_ape")),
         layers["stand_in"].get(gpu, "is the reference of its kind")]
        for gpu, s in layers["seen"]["by_gpu"].items()
    ]  # fmt: skip
    total, other = layers["seen"], layers["unseen"]
    rows.append(["all", f"{total['n']:,}", _percent(total["median_ape"]),
                 _percent(total["p90_ape"]), _percent(total["bias"], signed=True),
                 _percent(other["median_ape"]), ""])  # fmt: skip
    text = (
        "Kernel time of one layer, forward and backward, github.com/benson-guo/zorse and cephalo "
        "`data/model_latencies.json`. GPUs known only from this table were fitted on the llama "
        "rows of every second model and length ([kernels.md](kernels.md)); the last columns take "
        "another GPU's rates as if this one had never been measured.\n\n"
    )
    return text + table(
        ["GPU", "times", "median", "90 %", "bias", "median, GPU left out", "rates then"], rows
    )


def _worst(rows: Sequence[dict[str, Any]]) -> str:
    cells = [
        [f"{r['table']}:{r['line']}", r["model"], r["gpus"], r["plan"], f"{r['measured_s']:.4g}",
         f"{r['predicted_s']:.4g}", _percent(r["error"], signed=True),
         f"{time_label(r['largest'])} {100 * r['share']:.0f} %", "; ".join(r["assumptions"])]
        for r in rows
    ]  # fmt: skip
    return table(
        ["row", "model", "GPUs", "plan", "measured, s", "predicted, s", "error",
         "largest part predicted", "assumed"], cells,
    )  # fmt: skip


def _sources(sources: dict[str, Any]) -> str:
    return table(["table", "from"], [[n, SOURCES.get(n, ("own rows", ""))[0]] for n in sources])
