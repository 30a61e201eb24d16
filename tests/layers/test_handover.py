"""The norm of a layer's result comes with it, and where anything is in between, from the module that reads it."""

import copy
import gc
import threading

import pytest
import torch
from torch import nn

from fp8moe import GroupedExperts
from fp8moe.hf import optimize, register
from fp8moe.hf.fused import norms
from fp8moe.hf.fused.norms import Handover
from fp8moe.kernels.decoder_ops.rms_norm import Normed
from tests.hf.test_fused_models import distance, in_fp8, prompt
from tests.tiny_moe_models import MODELS

NAMES = ["Qwen3MoeForCausalLM", "Qwen2MoeForCausalLM", "DeepseekV3ForCausalLM"]


def run(model, rows=2):
    with torch.no_grad():
        return model(input_ids=prompt(rows)).logits


@pytest.fixture
def computed(monkeypatch):
    """What `norms.norm` was asked for."""
    calls, norm = [], norms.norm
    monkeypatch.setattr(
        norms, "norm", lambda module, *given, **how: calls.append(module) or norm(module, *given, **how)
    )
    return calls


def test_taken_once_by_who_asks_for_it():
    norm, other = nn.Linear(2, 2), nn.Linear(2, 2)
    handover, result, normed = Handover(norm, False), torch.ones(3), Normed(None, torch.ones(3), None)

    def taken(tensor=result, module=norm, quantized=False, change=lambda: None):
        handover.put(result, normed)
        change()
        return handover.take(tensor, module, quantized=quantized)

    assert taken() is normed and handover.take(result, norm, quantized=False) is None
    for wrong in (dict(tensor=result.clone()), dict(tensor=result.view(3)), dict(module=other), dict(quantized=True)):
        assert taken(**wrong) is None and handover.take(result, norm, quantized=False) is None
    assert taken(change=lambda: result.add_(1)) is None
    assert taken(change=lambda: result.view(3)[:1].add_(1)) is None
    copied = copy.deepcopy(handover)
    handover.put(result, normed)
    assert copied.take(result, copied.norm, quantized=False) is None and copied.norm is not norm


def test_it_does_not_outlive_the_result():
    handover = Handover(nn.Linear(2, 2), False)
    results = [torch.ones(3) for _ in range(2)]
    for result in results:
        handover.put(result, Normed(None, result + 1, None))
    del result, results[0]  # the second one is still there
    gc.collect()
    assert handover._held is not None
    results.clear()
    gc.collect()
    assert handover._held is None


@pytest.mark.parametrize("name", NAMES)
def test_norms_come_with_the_results(name, computed):
    model = in_fp8(name, torch.float32)
    before = run(model)
    changed = optimize(model)
    layers = model.model.layers
    assert distance(run(model), before) <= 1e-5
    after = [layer.input_layernorm for layer in layers[1:]] + [model.model.norm]
    assert layers[0].input_layernorm in computed and not any(module in computed for module in after)
    changed.restore()
    computed.clear()
    assert torch.equal(run(model), before) and not computed


def test_norms_come_with_the_results_of_transformers_experts(computed):
    register()
    model = MODELS[NAMES[0]].build(experts_implementation="fp8moe").requires_grad_(False)
    before = run(model)
    optimize(model)
    assert distance(run(model), before) <= 1e-5
    assert computed == [model.model.layers[0].input_layernorm]


def test_many_tokens_are_normalized_by_who_reads_them(computed):
    model = in_fp8(NAMES[0], torch.float32)
    before = run(model, 6)
    optimize(model)
    assert distance(run(model, 6), before) <= 1e-5
    assert {layer.input_layernorm for layer in model.model.layers} | {model.model.norm} <= set(computed)


def test_a_copy_hands_over_by_itself(computed):
    model = in_fp8(NAMES[0], torch.float32)
    optimize(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for module in other.modules():
            if hasattr(module, "variance_epsilon"):
                module.weight.mul_(1.5)
    expected = in_fp8(NAMES[0], torch.float32)
    expected.load_state_dict(other.state_dict())
    computed.clear()
    assert distance(run(other), run(expected)) <= 1e-5
    assert computed == [other.model.layers[0].input_layernorm]


def _replaced(module, inputs, output):
    return output * 2


def _in_place(module, inputs, output):
    output.mul_(2)


def _changed_input(module, inputs, kwargs):
    inputs[0].mul_(2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("hook", [_replaced, _in_place, _changed_input])
def test_hooks_that_change_what_is_handed_over(hook, mode):
    model, expected = in_fp8(NAMES[0], torch.float32), in_fp8(NAMES[0], torch.float32)
    optimize(model)
    for which in (model, expected):
        if hook is _changed_input:
            which.model.layers[1].register_forward_pre_hook(hook, with_kwargs=True)
        else:
            which.model.layers[0].register_forward_hook(hook)
    with mode():
        got, other = (which(input_ids=prompt()).logits for which in (model, expected))
    assert distance(got, other) <= 1e-5


def test_layers_that_are_left_out_and_norms_that_are_exchanged():
    model, expected = in_fp8(NAMES[0], torch.float32), in_fp8(NAMES[0], torch.float32)
    optimize(model)
    run(model)
    for which in (model, expected):
        which.model.layers[1].input_layernorm = copy.deepcopy(which.model.layers[0].post_attention_layernorm)
        nn.init.normal_(which.model.layers[1].input_layernorm.weight, generator=torch.Generator().manual_seed(0))
    assert distance(run(model), run(expected)) <= 1e-5
    for which in (model, expected):
        which.model.layers = which.model.layers[:1]
        which.config.num_hidden_layers = 1
    assert distance(run(model), run(expected)) <= 1e-5


def test_gradients_go_through_the_models_own_forwards(computed):
    model, expected = in_fp8(NAMES[0], torch.float32), in_fp8(NAMES[0], torch.float32)
    optimize(model)
    run(model)
    computed.clear()
    got, other = (which(input_ids=prompt()).logits for which in (model, expected))
    assert not computed and got.requires_grad and torch.equal(got, other)


def test_threads_do_not_get_each_others_norms():
    model = in_fp8(NAMES[0], torch.float32)
    optimize(model)
    prompts = [prompt(1), prompt(3).flip(1)]
    with torch.no_grad():
        expected = [model(input_ids=ids).logits for ids in prompts]
    wrong = []

    def work(ids, other):
        with torch.no_grad():
            for _ in range(10):
                if distance(model(input_ids=ids).logits, other) > 1e-5:
                    wrong.append(ids)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(prompts, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_experts_that_keep_rows_free_hand_over_too(computed):
    model = in_fp8(NAMES[0], torch.float32)
    for module in model.modules():
        if isinstance(module, GroupedExperts):
            module.decode_capacity = 24
    before = run(model)
    optimize(model)
    assert distance(run(model), before) <= 1e-5
    assert computed == [model.model.layers[0].input_layernorm]
