"""`fp8moe serve`: an OpenAI-compatible server of one model."""

import argparse
import copy
import json
import socket
import warnings
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import torch

from fp8moe.runtime import config
from fp8moe.runtime.progress import shown, still_running
from fp8moe.weights import find_format
from fp8moe.weights.source import open_checkpoint, read_json

PACKAGES = ("transformers", "fastapi", "uvicorn", "prometheus_client")
MAX_LENGTH = 4096
"""Default of --max-length, in tokens; lower if the model has fewer positions."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Loopback addresses.

A server that listens at one of them accepts only this address and "localhost" as Host header: a defence against DNS
rebinding.
"""


def run(options: argparse.Namespace) -> int:
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise RuntimeError(f"{', '.join(missing)}: not installed, and needed to serve: pip install 'fp8moe[serve]'")
    from transformers.utils import logging

    from fp8moe.serving import BatchingManager, DecoderManager, Ranks, make_app, serve

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    ranks = Ranks.join(options.device)
    serves = ranks is None or ranks.serves
    address = nullcontext() if not serves else socket.create_server((options.host, options.port), family=family)
    with address as listener:
        with shown(serves and not options.quiet):
            device = _device(options.device) if ranks is None else ranks.device
            directory = str(open_checkpoint(options.model).directory)
            with still_running("loading the model"):
                size = 1 if ranks is None else ranks.size
                model, tokenizer = load(directory, device, trust_remote_code=options.trust_remote_code, ranks=size)
                decoder = make_decoder(
                    *(model, options.slots, options.max_length, options.cache_dtype, options.output_dtype),
                    alone=ranks is None,
                )
            if decoder is not None:
                check_settings(decoder, tokenizer)
        if not serves:
            ranks.follow(decoder, tokenizer)
            return 0
        most = options.max_length or min(MAX_LENGTH, positions(model))
        manager = DecoderManager(decoder, ranks) if decoder else BatchingManager(model, most)
        name = options.served_model_name or options.model
        hosts = {options.host, "localhost"} if options.host in LOOPBACK else None
        app = make_app(name, model, tokenizer, manager, api_key=options.api_key, hosts=hosts)
        _announce(options, name, listener.getsockname()[1], decoder)
        serve(app, manager, listener)
    return 0


def load(directory: str, device: str | None, *, trust_remote_code: bool = False, ranks: int = 1) -> tuple[Any, Any]:
    """Load a model with its experts on fp8moe, and its tokenizer. device: None for a GPU if there is one, else the CPU.

    ranks: how many processes of `torch.distributed` hold the model together; each gets whole experts, and its part of
    what transformers' plan shards.
    trust_remote_code: if config.json names model code in the checkpoint (auto_map), build the model with that code.
    Raises ValueError if the model or its tokenizer cannot be loaded, if one of the two needs code that
    trust_remote_code does not allow, and if tensors are missing, left over or misshapen.
    """
    import transformers

    from fp8moe.decode.use import ranks_of
    from fp8moe.hf import load_model, register
    from fp8moe.hf.architecture import read_config, reason_of
    from fp8moe.hf.experts import NAME
    from fp8moe.hf.versions import over_ranks

    register()
    device, stored, checkpoint = _device(device), find_format(directory), open_checkpoint(directory)
    if not stored.loads:
        raise ValueError(f"{directory}: {stored.reason}")
    has_code, what = trust_remote_code and "auto_map" in checkpoint.config, ""
    try:
        if not has_code:
            read_config(checkpoint)
        what = "tokenizer: "
        declared = read_json(checkpoint.directory / "tokenizer_config.json", [])
        known = hasattr(transformers, str(declared.get("tokenizer_class")))
        if declared.get("auto_map") and not (known or trust_remote_code):
            # Without this error transformers would load the tokenizer with another class.
            raise ValueError("its class is custom code of the checkpoint")
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except Exception as error:  # broken files make transformers raise anything
        reason = reason_of(error).removeprefix("ValueError: ")
        way_out = "; --trust-remote-code runs that code" if "custom code" in reason else ""
        raise ValueError(f"{directory}: {what}{reason}{way_out}") from error
    if not tokenizer.is_fast:
        raise ValueError(f"{directory}: its tokenizer is not a fast one (tokenizer.json), which serve needs")
    kind, options = transformers.AutoModelForCausalLM, {"dtype": "auto", "experts_implementation": NAME}
    if ranks > 1:
        if stored.scales not in ("128x128", "none"):
            raise ValueError(
                f"{directory}: several processes serve weights in bfloat16 or in FP8 with a scale for 128x128 values, "
                f"not {stored.name}"
            )
        plan = over_ranks(transformers.AutoConfig.from_pretrained(directory, trust_remote_code=has_code), ranks)
        options |= {"distributed_config": plan, "trust_remote_code": trust_remote_code}
        model = kind.from_pretrained(directory, **options).eval()
        if not ranks_of(model).groups:
            raise ValueError(
                f"{directory}: transformers has no plan that spreads {type(model).__name__} over processes"
            )
        return model, tokenizer
    if has_code:
        options |= {"device_map": device, "trust_remote_code": True}
        return kind.from_pretrained(directory, **options).eval(), tokenizer
    with warnings.catch_warnings():
        # The warning would be wrong: the experts are put on fp8moe below.
        warnings.filterwarnings("ignore", ".*nothing of it runs on fp8moe")
        model = load_model(directory, dtype="auto", device=device)
    if stored.scales == "none":
        model.set_experts_implementation(NAME)
    return model, tokenizer


def _device(name: str | None) -> str:
    """Return the device of this name; None: a GPU if there is one, else the CPU. Raises ValueError if unavailable."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    name = name or ("cuda" if gpus else "cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or not (index.isdecimal() or name == kind):
        raise ValueError(f"--device {name}: expected cpu, cuda or cuda:N")
    if kind == "cuda" and int(index or 0) >= gpus:
        raise ValueError(
            f"--device {name}, but PyTorch finds {gpus or 'no'} GPU that it can use; --device cpu works too"
        )
    return name


def make_decoder(
    model: Any,
    slots: int,
    max_length: int | None,
    cache_dtype: str | None = None,
    output_dtype: str | None = None,
    *,
    alone: bool = True,
) -> Any:
    """Return a GraphDecoder for `slots` sequences; or warn and return None if only transformers can serve the model.

    cache_dtype, output_dtype: "fp8" for keys and values, or the output layer, in FP8; None for the model's dtype.
    alone: whether this process has the whole model, as transformers' server needs.

    Raises ValueError for a model that neither GraphDecoder nor transformers can serve, for a max_length above the
    model's number of positions, for caches that do not fit into memory, and for a dtype that the model's decoder cannot
    have.
    """
    from fp8moe.decode import GraphDecoder
    from fp8moe.hf.architecture import reason_of

    most = positions(model)
    if (max_length or 0) > most:
        raise ValueError(f"--max-length {max_length}: the model has {most} positions")
    max_length = max_length or min(MAX_LENGTH, most)
    sizes = sorted({1, max(1, slots // 8), slots})
    asked = {"cache_dtype": cache_dtype, "output_dtype": output_dtype}
    try:
        dtypes = {name: torch.float8_e4m3fn if value else None for name, value in asked.items()}
        decoder = GraphDecoder(model, batch_sizes=sizes, max_length=max_length, **dtypes)
        decoder.run([])  # raises for a model whose sequences cannot share a batch
        return decoder
    except TypeError as error:
        raise ValueError(str(error)) from error
    except ValueError as error:
        reason = str(error)
        for name, value in asked.items():
            if value and reason.startswith(("model:", f"{name}:")):  # transformers would keep the model's dtype
                option = f"--{name.replace('_', '-')} {value}"
                raise ValueError(f"{option}: {reason.removeprefix(f'{name}: ')}") from error
        if not reason.startswith("model:"):
            raise ValueError(f"--slots {slots}, --max-length {max_length}: {reason}") from error
        if config.settings.batch_invariant or not alone:  # transformers' continuous batching can be neither
            raise
    try:
        model.init_continuous_batching(copy.deepcopy(model.generation_config))
    except Exception as error:
        raise ValueError(
            f"{reason}; nor does transformers' continuous batching serve it: {reason_of(error)}"
        ) from error
    warnings.warn(
        f"{reason}; transformers' continuous batching serves it, with fp8moe's experts, without --slots, "
        "and requests cannot set sampling or stop strings",
        stacklevel=2,
    )
    return None


def check_settings(decoder: Any, tokenizer: Any) -> None:
    """Raise ValueError if the model's generation config makes the decoder refuse a request that sets nothing itself."""
    from fp8moe.decode.request import parse_one
    from fp8moe.serving.fields import Reader

    body = b'{"prompt": [0], "max_tokens": 1, "seed": 0}'
    asked = Reader("", decoder.model, tokenizer, decoder.max_length, own_settings=True).read(body, chat=False)
    arguments = asked.options | {
        "input_ids": torch.tensor([0], dtype=torch.int64, device="cpu"),
        "tokenizer": tokenizer,
    }
    try:
        parse_one(decoder, arguments, None, asked.config, stops_in_answer=True)
    except (TypeError, ValueError) as error:
        reason = str(error).removeprefix("generation_config.").partition("; set it to None")[0]
        raise ValueError(
            f"generation_config.{reason}, so a request that sets nothing itself would be refused"
        ) from error


def positions(model: Any) -> int:
    """Return the longest sequence that a model's configuration allows, in tokens."""
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or MAX_LENGTH


def _announce(options: argparse.Namespace, name: str, port: int, decoder: Any) -> None:
    """Print where the server listens, and its limits, now that clients can connect."""
    host = f"[{options.host}]" if ":" in options.host else options.host
    facts = {"model": name, "url": f"http://{host}:{port}/v1", "runs": "transformers"}
    if decoder is not None:
        facts |= {"runs": "GraphDecoder", "slots": decoder.batch_sizes[-1], "max_length": decoder.max_length}
    if options.json:
        print(json.dumps(facts), flush=True)
    elif not options.quiet:
        most = f", {facts['slots']} sequences of up to {facts['max_length']} tokens" if decoder else ""
        print(f"{name} at {facts['url']}{most}", flush=True)
