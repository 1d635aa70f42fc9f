"""Parameter counts against published ones, to the last parameter.

Sources: ``hub`` is the total of the safetensors metadata of the named repository on
huggingface.co (checkpoints of tied models hold the embedding once); ``keras`` the ``params`` of
the preset in keras-hub; ``card`` the repository's model card; others are named.
"""

from __future__ import annotations

import pytest

from simulator.spec.parameters import active_parameters, mtp_parameters, total_parameters
from simulator.spec.presets import preset

PUBLISHED = {
    # hub counts 2,048 to 5,120 rotary buffers on top of these three (32 x 64, 40 x 64, 80 x 64).
    "llama-2-7b": (6_738_415_616, "keras llama2_7b_en; hub meta-llama/Llama-2-7b-hf"),
    "llama-2-13b": (13_015_864_320, "hub meta-llama/Llama-2-13b-hf"),
    "llama-2-70b": (68_976_648_192, "hub meta-llama/Llama-2-70b-hf"),
    "llama-65b": (65_285_660_672, "transformers' num_parameters of LLaMA-65B"),
    "llama-3.1-8b": (8_030_261_248, "hub meta-llama/Llama-3.1-8B"),
    "llama-3.1-70b": (70_553_706_496, "hub meta-llama/Llama-3.1-70B"),
    "llama-3.1-405b": (405_853_388_800, "hub meta-llama/Llama-3.1-405B"),
    "llama-3.2-1b": (1_235_814_400, "hub meta-llama/Llama-3.2-1B"),
    "llama-3.2-3b": (3_212_749_824, "hub meta-llama/Llama-3.2-3B"),
    "tinyllama-1.1b": (1_100_048_384, "hub TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
    "gpt2-small": (124_439_808, "keras gpt2_base_en"),
    "gpt2-xl": (1_557_611_200, "keras gpt2_extra_large_en"),
    "mistral-7b-v0.1": (7_241_732_096, "hub mistralai/Mistral-7B-v0.1"),
    "mistral-7b-v0.3": (7_248_023_552, "hub mistralai/Mistral-7B-Instruct-v0.3"),
    "mixtral-8x7b": (46_702_792_704, "hub mistralai/Mixtral-8x7B-v0.1; keras mixtral_8_7b_en"),
    "mixtral-8x22b": (140_630_071_296, "hub mistralai/Mixtral-8x22B-Instruct-v0.1"),
    "qwen2.5-0.5b": (494_032_768, "hub Qwen/Qwen2.5-0.5B"),
    "qwen2.5-3b": (3_085_938_688, "hub Qwen/Qwen2.5-3B"),
    "qwen2.5-7b": (7_615_616_512, "hub Qwen/Qwen2.5-7B"),
    "qwen2.5-32b": (32_763_876_352, "hub Qwen/Qwen2.5-32B"),
    "qwen2.5-72b": (72_706_203_648, "hub Qwen/Qwen2.5-72B"),
    "qwen1.5-moe-a2.7b": (14_315_784_192, "keras qwen1.5_moe_2.7b_en"),
    "qwen3-0.6b": (596_049_920, "nn.Module count of Qwen3-0.6B without the tied head"),
    "qwen3-8b": (8_190_735_360, "hub Qwen/Qwen3-8B"),
    "qwen3-32b": (32_762_123_264, "hub Qwen/Qwen3-32B"),
    "qwen3-30b-a3b": (30_532_122_624, "hub Qwen/Qwen3-30B-A3B"),
    "qwen3-235b-a22b": (235_093_634_560, "hub Qwen/Qwen3-235B-A22B; index total_size / 2"),
    "gemma-7b": (8_537_680_896, "keras gemma_7b_en"),
    "gemma-2-2b": (2_614_341_888, "hub google/gemma-2-2b"),
    "gemma-2-9b": (9_241_705_984, "hub google/gemma-2-9b"),
    "gemma-2-27b": (27_227_128_320, "hub google/gemma-2-27b"),
    "gemma-3-1b": (999_885_952, "hub google/gemma-3-1b-it"),
    "gemma-3-4b": (3_880_263_168, "text model of google/gemma-3-4b"),
    "gemma-3-27b": (27_009_346_304, "text model of google/gemma-3-27b, n_params of llama.cpp"),
    "opt-350m": (331_196_416, "numel of facebook/opt-350m"),
    "bloom-560m": (559_214_592, "hub bigscience/bloom-560m"),
    "bloom-1.1b": (1_065_314_304, "hub bigscience/bloom-1b1"),
    "bloom-1.7b": (1_722_408_960, "hub bigscience/bloom-1b7"),
    "bloom-3b": (3_002_557_440, "hub bigscience/bloom-3b"),
    "bloom-7.1b": (7_069_016_064, "hub bigscience/bloom-7b1"),
    "bloom-176b": (176_247_271_424, "card bigscience/bloom"),
    "falcon-180b": (179_522_565_120, "hub tiiuae/falcon-180B"),
    "phi-3-mini-4k": (3_821_079_552, "hub microsoft/Phi-3-mini-4k-instruct"),
    "phi-3-medium": (13_960_238_080, "numel of microsoft/Phi-3-medium-4k-instruct"),
    "phi-4": (14_659_507_200, "hub microsoft/phi-4"),
    "deepseek-v2-lite": (15_706_484_224, "hub deepseek-ai/DeepSeek-V2-Lite"),
    "deepseek-v2": (235_741_434_880, "hub deepseek-ai/DeepSeek-V2"),
    "deepseek-v3": (671_026_419_200, "headers of deepseek-ai/DeepSeek-V3, main model"),
    "bert-base": (110_106_428, "hub google-bert/bert-base-uncased (pre-training heads)"),
    "bert-large": (336_226_108, "hub google-bert/bert-large-uncased (pre-training heads)"),
    "vit-b-16": (86_567_656, "torchvision vit_b_16 num_params"),
    "vit-l-16": (304_326_632, "torchvision vit_l_16 num_params"),
    "gpt-j-6b": (6_050_882_784, "card EleutherAI/gpt-j-6b"),
    "gpt-neox-20b": (20_554_567_680, "card EleutherAI/gpt-neox-20b"),
    "pythia-2.8b": (2_775_208_960, "card EleutherAI/pythia-2.8b"),
    "pythia-6.9b": (6_857_302_016, "card EleutherAI/pythia-6.9b"),
    "pythia-12b": (11_846_072_320, "card EleutherAI/pythia-12b"),
}

#: Printed to fewer digits than the parameter: (printed, unit of its last digit, source).
ROUNDED = {
    "llama-7b": (6.7e9, 1e8, "arXiv 2302.13971 table 2"),
    "llama-33b": (32.5e9, 1e8, "arXiv 2302.13971 table 2"),
    "megatron-1.7b": (1.7e9, 1e8, "arXiv 2104.04473 table 1"),
    "megatron-18b": (18.4e9, 1e8, "arXiv 2104.04473 table 1"),
    "megatron-39b": (39.1e9, 1e8, "arXiv 2104.04473 table 1"),
    "megatron-145b": (145.6e9, 1e8, "arXiv 2104.04473 table 1"),
    "megatron-310b": (310.1e9, 1e8, "arXiv 2104.04473 table 1"),
    "megatron-530b": (529.6e9, 1e8, "arXiv 2104.04473 table 1"),
    "megatron-1t": (1008.0e9, 1e8, "arXiv 2104.04473 table 1"),
    "megatron-22b": (22e9, 1e9, "arXiv 2205.05198 table 3"),
    "gpt3-2.7b": (2.7e9, 1e8, "arXiv 2005.14165 table 2.1"),
    "gpt3-6.7b": (6.7e9, 1e8, "arXiv 2005.14165 table 2.1"),
    "gpt3-175b": (175e9, 1e9, "arXiv 2005.14165 table 2.1"),
    "nemotron-4-340b": (341e9, 1e9, "arXiv 2406.11704 section 2.1: 9.4 + 331.6 billion"),
}

#: Active parameters per token: (printed, unit of its last digit, source).
ACTIVE = {
    "mixtral-8x7b": (12.9e9, 1e8, "card mistralai/Mixtral-8x7B"),
    "mixtral-8x22b": (39e9, 1e9, "Mistral's announcement of Mixtral 8x22B"),
    "qwen3-235b-a22b": (22e9, 1e9, "card Qwen/Qwen3-235B-A22B"),
    "deepseek-v2": (21e9, 1e9, "arXiv 2405.04434 abstract"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_count_is_published_count(name: str) -> None:
    count, source = PUBLISHED[name]
    assert total_parameters(preset(name)) == count, source


@pytest.mark.parametrize("name", ROUNDED)
def test_count_rounds_to_printed_count(name: str) -> None:
    printed, unit, source = ROUNDED[name]
    # Papers round or cut off their last digit.
    assert abs(total_parameters(preset(name)) - printed) < unit, source


@pytest.mark.parametrize("name", ACTIVE)
def test_active_count_rounds_to_printed_count(name: str) -> None:
    printed, unit, source = ACTIVE[name]
    assert abs(active_parameters(preset(name)) - printed) < unit, source


def test_deepseek_v3_active_count() -> None:
    # README_WEIGHTS.md of DeepSeek-V3: 36.7 billion with the head, without the embedding (0.9).
    model = preset("deepseek-v3")
    without_embedding = active_parameters(model) - model.vocab * model.hidden
    assert without_embedding == pytest.approx(36.7e9, abs=0.1e9)


def test_deepseek_v3_checkpoint_is_main_model_module_and_scales() -> None:
    # hub deepseek-ai/DeepSeek-V3. The module's copy of embedding and head is in the checkpoint,
    # and one scale for each block of 128 x 128 of the matrices in FP8.
    def blocks(rows: int, columns: int) -> int:
        return -(-rows // 128) * -(-columns // 128)

    model = preset("deepseek-v3")
    mla = [(1536, 7168), (128 * 192, 1536), (576, 7168), (128 * 256, 512), (7168, 128 * 128)]
    scales = 62 * sum(blocks(*shape) for shape in mla)
    scales += 3 * 3 * blocks(18432, 7168) + 59 * 257 * 3 * blocks(2048, 7168)
    copies = 2 * model.vocab * model.hidden
    assert total_parameters(model) + mtp_parameters(model) + copies + scales == 684_531_386_000


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("gemma-3-4b", 4_300_079_472),
        ("gemma-3-12b", 12_187_325_040),
        ("gemma-3-27b", 27_432_406_640),
    ],
)
def test_gemma_3_text_model_and_vision_tower_make_the_checkpoint(name: str, whole: int) -> None:
    # hub google/gemma-3-*-it. The rest is one vision tower (SigLIP 400M and a norm of 1152) for
    # all sizes, and a projection from its width of 1152 to the text model's.
    model = preset(name)
    tower = 416_867_184
    assert total_parameters(model) + tower + 1152 * model.hidden == whole
