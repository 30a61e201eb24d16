"""Which models GraphDecoder takes: those whose step gives model.generate's tokens, and refusals that say why."""

from types import SimpleNamespace

import pytest
import torch

from fp8moe.decode import GraphDecoder
from fp8moe.decode.probe import check_step
from fp8moe.decode.transfers import HostReads
from fp8moe.runtime.capture import capturing, rehearsed
from tests.decode_models import tiny_mixtral
from tests.linear_attention_models import NAMES, PROMPTS, READ_ON_THE_HOST, build
from tests.tiny_moe_models import MODELS
from tests.transformers_models import BASE, left_padded, prompts, random_model

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", NAMES)
def test_linear_attention(name):
    model = build(name)
    decoder = GraphDecoder(model, batch_sizes=(1, 3), max_length=32)
    for batch, length, padding in PROMPTS:
        ids = prompts(batch, length, seed=length)
        mask = left_padded(ids, *padding)
        expected = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=8)
        assert torch.equal(decoder.generate(ids, attention_mask=mask, max_new_tokens=8), expected)


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(READ_ON_THE_HOST)))
def test_states_stay_where_they_are(name):
    """A graph reads and writes the addresses of its capture."""

    def addresses(step):
        tensors = [value for layer in step.cache.layers for value in vars(layer).values()]
        states = [state for value in tensors if isinstance(value, dict) for state in value.values()]
        return [value.data_ptr() for value in tensors + states if isinstance(value, torch.Tensor)]

    decoder = GraphDecoder(build(name), batch_sizes=(2,), max_length=32)
    step = decoder.steps[2]
    with torch.no_grad():
        step.start(2, 1, None, [], 0)
        step.advance()
        step.advance()
        captured = addresses(step)
        step.advance()
    assert addresses(step) == captured
    for length in (1, 9):
        decoder.generate(prompts(2, length), max_new_tokens=4)
        assert addresses(step) == captured


@pytest.mark.parametrize("name", NAMES)
def test_linear_attention_can_be_captured(name):
    model = build(name, experts_implementation="batched_mm")
    if name in READ_ON_THE_HOST:
        with pytest.raises(ValueError, match=rf"cannot be captured, it reads .* \({READ_ON_THE_HOST[name]}\)"):
            check_step(model, CPU, captured=True)
    else:
        check_step(model, CPU, captured=True)


TINY = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "pad_token_id": 0}
TWO = {"num_hidden_layers": 2}
NO_ENCODER = {"is_decoder": True, "is_encoder_decoder": False, "num_encoder_layers": 1, "num_decoder_layers": 1}
REFUSED = {
    "rwkv": (TWO, "RwkvForCausalLM"),
    "xlstm": (TWO | {"num_heads": 4}, "xLSTMForCausalLM"),
    "mamba": (TWO, "MambaForCausalLM"),
    "falcon_mamba": (TWO, "FalconMambaForCausalLM"),
    "xlnet": ({"d_model": 32, "n_layer": 2, "n_head": 4}, "XLNetLMHeadModel"),
    "xlm": (
        {"emb_dim": 32, "n_layers": 2, "n_heads": 4},
        "XLMWithLMHeadModel",
    ),  # from 5.24 on it takes a cache, of its own
    "bloom": ({"n_layer": 2, "n_head": 4}, "BloomForCausalLM"),
    "mpt": ({"d_model": 32, "n_heads": 4, "n_layers": 2}, "MptForCausalLM"),
    "prophetnet": (NO_ENCODER, "ProphetNetForCausalLM"),
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_models_that_are_refused(model_type):
    options, name = REFUSED[model_type]
    message = (
        f"expected a model whose forward takes a cache and position_ids, got {name}|{name} cannot run a decode step"
    )
    with pytest.raises((TypeError, ValueError), match=f"^model: ({message})"):
        GraphDecoder(random_model(model_type, TINY | options), max_length=8)


def test_position_biases_of_prompts_that_are_padded():
    """Falcon's alibi counts the columns of the mask."""
    model = random_model("falcon", TINY | TWO | {"alibi": True, "initializer_range": 0.3})
    ids = prompts(3, 12) % TINY["vocab_size"]
    mask = left_padded(ids, 4, 0, 9)
    expected = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=8, eos_token_id=None)
    decoder = GraphDecoder(model, batch_sizes=(3,), max_length=32)
    assert torch.equal(decoder.generate(ids, attention_mask=mask, max_new_tokens=8, eos_token_id=()), expected)


def test_routers_that_mix_the_tokens_of_a_call_are_refused():
    model = MODELS["DogeForCausalLM"].build()
    with pytest.raises(ValueError, match=r"layers.0.mlp \(DogeCDMoE\) routes a token by others of the same call"):
        GraphDecoder(model, max_length=8)


def test_other_caches_are_refused():
    for name, message in (
        ("Llama4ForCausalLM", "layer 0 keeps a StaticSlidingWindowLayer"),
        ("DeepseekV4ForCausalLM", "transformers has no static cache for its layers of type"),
        (
            "MiniMaxForCausalLM",
            r"MiniMaxForCausalLM cannot run a decode step \(ValueError: MiniMax uses cache of its own",
        ),
    ):
        with pytest.raises(ValueError, match=f"^model: {message}"):
            GraphDecoder(MODELS[name].build(), max_length=8)


LLAMA = BASE | {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 2}


def llama_class():
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("initializer_range", [0.02, 0.2])
def test_a_model_that_forgets_is_refused(dtype, initializer_range):
    class Forgetful(llama_class()):
        def forward(self, input_ids=None, position_ids=None, past_key_values=None, **kwargs):
            return super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs | {"attention_mask": None})

    config = transformers.LlamaConfig(**LLAMA, initializer_range=initializer_range)
    model = Forgetful(config).to(dtype).eval()
    with pytest.raises(ValueError, match="the logits of Forgetful are not those that it gives without a cache"):
        GraphDecoder(model, max_length=8)


def test_other_positions_are_noticed():
    class Shifted(llama_class()):
        def forward(self, input_ids=None, position_ids=None, past_key_values=None, **kwargs):
            if past_key_values is not None and input_ids.shape[1] == 1:
                position_ids = position_ids + 5
            return super().forward(
                input_ids=input_ids, position_ids=position_ids, past_key_values=past_key_values, **kwargs
            )

    model = Shifted(transformers.LlamaConfig(**LLAMA, initializer_range=0.2)).eval()
    with pytest.raises(ValueError, match="the logits of Shifted are not those"):
        GraphDecoder(model, max_length=8)


@pytest.mark.parametrize("initializer_range", [1e-4, 0.02, 0.2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_refuses_no_model(dtype, initializer_range, registered):
    """Every linear of it gives other bits at each call, as kernels for other shapes do."""
    options = LLAMA | {"num_hidden_layers": 8, "initializer_range": initializer_range, "num_local_experts": 8}
    model = random_model("mixtral", options, dtype=dtype, experts_implementation="fp8moe")

    def round_otherwise(module, args, output):
        return output * (1 + torch.finfo(dtype).eps / 4 * torch.randn_like(output))

    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(round_otherwise)
    check_step(model, CPU, captured=True)


def test_a_model_of_nan_is_refused():
    model = random_model("llama", LLAMA)
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="^model: the logits of LlamaForCausalLM are NaN"):
        GraphDecoder(model, max_length=8)


def test_logits_that_no_token_is_chosen_from_are_refused():
    with pytest.raises(ValueError, match="^model: the logits of LlamaForCausalLM are torch.float64, expected bfloat16"):
        GraphDecoder(random_model("llama", LLAMA, dtype=torch.float64), max_length=8)


def test_weights_without_memory_are_refused():
    with pytest.raises(ValueError, match="^model: expected weights in memory, they are on the meta device"):
        GraphDecoder(random_model("llama", LLAMA).to("meta"), max_length=8)


def test_a_model_that_is_cast_after_the_decoder_was_made_is_refused():
    model, ids = build("MixtralForCausalLM"), prompts(1, 4)
    decoder = GraphDecoder(model, max_length=8)
    expected = decoder.generate(ids, max_new_tokens=2)
    before = model.dtype
    model.half()
    with pytest.raises(RuntimeError, match=f"^the model is torch.float16 on cpu, and was {before} on cpu when"):
        decoder.generate(ids, max_new_tokens=2)
    assert GraphDecoder(model, max_length=8).generate(ids, max_new_tokens=2).shape == expected.shape


@pytest.mark.parametrize("name", ["MixtralForCausalLM", "JambaForCausalLM", "Qwen3VLMoeForConditionalGeneration"])
def test_models_that_are_set_to_return_the_logits_of_routers(name):
    """As configurations of models are that were trained with a loss of these."""
    model, ids = build(name), prompts(2, 6)
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=4)
    for config in (model.config, model.config.get_text_config()):
        config.output_router_logits = True
    decoder = GraphDecoder(model, batch_sizes=(3,), max_length=16)
    assert torch.equal(decoder.generate(ids, max_new_tokens=4), expected)
    assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=4, custom_generate=decoder), expected)


def test_autocast_of_the_caller_changes_nothing():
    model, ids, how = tiny_mixtral(), prompts(2, 6), {"max_new_tokens": 4}
    expected = GraphDecoder(model, batch_sizes=(2,), max_length=16).generate(ids, **how)
    with torch.autocast("cpu", torch.bfloat16):
        decoder = GraphDecoder(model, batch_sizes=(2,), max_length=16)
        assert decoder.fused
        prefix = decoder.prefix(ids[0, :4])
        assert torch.equal(decoder.generate(ids, **how), expected)
        assert torch.equal(torch.stack([*decoder.stream(ids, **how)], 1), expected[:, 6:])
        assert torch.equal(decoder.generate(ids[:1, 4:], prefix=prefix, **how), expected[:1, 4:])
        found = dict(decoder.run([{"input_ids": row} | how for row in ids]))
        assert all(torch.equal(found[row], expected[row, 6:]) for row in found)
        assert torch.is_autocast_enabled("cpu")


def test_a_step_that_reads_values_on_the_host_is_refused_before_the_capture():
    model = random_model("mixtral", LLAMA | {"num_local_experts": 4}, experts_implementation="eager")
    check_step(model, CPU, captured=False)
    with pytest.raises(ValueError, match=r"step of MixtralForCausalLM cannot be captured, .* \(aten\.\w+"):
        check_step(model, CPU, captured=True)


x, mask, rows = torch.arange(6.0).reshape(2, 3), torch.tensor([True, False]), torch.tensor([1, 0])


@pytest.mark.parametrize(
    ("operation", "found"),
    [
        (lambda: x[0, 0].item(), ["aten._local_scalar_dense.default"]),
        (lambda: bool(x.sum() > 0), ["aten._local_scalar_dense.default"]),
        (lambda: x.nonzero(), ["aten.nonzero.default"]),
        (lambda: x[mask], ["aten.index.Tensor"]),
        (lambda: x.clone().index_put_((mask,), torch.ones(1, 3)), ["aten.index_put_.default"]),
        (lambda: x.repeat_interleave(rows, 0), ["aten.repeat_interleave.Tensor"]),
        (lambda: x[rows], []),
        (lambda: x.clone().index_put_((rows,), torch.ones(1, 3)), []),
        (lambda: x.clone().index_put_((mask,), torch.tensor(0.0)), []),
        (lambda: x.repeat_interleave(rows, 0, output_size=1), []),
        (lambda: x.masked_fill(mask[:, None], 0.0).to(torch.bfloat16).topk(2), []),
    ],
)
def test_what_the_host_reads(operation, found):
    with HostReads(CPU) as reads:
        operation()
    assert reads.operations == found


def test_what_is_searched_for_reads_does_as_in_a_capture():
    on_a_gpu = SimpleNamespace(is_cuda=True)
    reads = HostReads(torch.device("cuda"))
    for _ in range(2):
        with pytest.raises(KeyError), reads:
            assert capturing(on_a_gpu) and not capturing(torch.ones(1))
            raise KeyError
        assert not rehearsed.get()


def test_copies_to_the_host_are_read_there():
    with HostReads(torch.device("meta")) as reads, pytest.raises(NotImplementedError):  # meta tensors have no values
        torch.ones(2, device="meta").to("cpu")
    assert reads.operations == ["aten._to_copy.default"]
    with HostReads(torch.device("meta")) as reads:
        x[0, 0].item()
    assert reads.operations == []
