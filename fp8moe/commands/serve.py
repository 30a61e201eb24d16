"""`fp8moe serve`: an OpenAI-compatible server of one model."""

import argparse
import copy
import json
import socket
import warnings
from importlib.util import find_spec
from typing import Any

import torch

from fp8moe.runtime import config
from fp8moe.runtime.progress import shown, still_running
from fp8moe.weights import find_format
from fp8moe.weights.source import open_checkpoint

PACKAGES = ("transformers", "fastapi", "uvicorn", "openai")
MAX_LENGTH = 4096
"""Default of --max-length, in tokens; lower if the model has fewer positions."""
SECONDS_TO_FINISH = 10
"""Seconds that running answers get to finish after Ctrl-C or SIGTERM, before they are cancelled."""


def run(options: argparse.Namespace) -> int:
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise RuntimeError(f"{', '.join(missing)}: not installed, and needed to serve: pip install 'fp8moe[serve]'")
    import uvicorn
    from transformers.utils import logging

    from fp8moe.serving import DecoderManager, make_app

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    with socket.create_server((options.host, options.port), family=family) as listener:
        with shown(not options.quiet):
            directory = str(open_checkpoint(options.model).directory)
            with still_running("loading the model"):
                model, tokenizer = load(directory, options.device)
                decoder = make_decoder(model, options.slots, options.max_length)
        app = make_app(options.model, model, tokenizer, DecoderManager(decoder) if decoder else None)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=SECONDS_TO_FINISH))
        _announce(options, listener.getsockname()[1], decoder)
        server.run(sockets=[listener])
    return 0


def load(directory: str, device: str | None) -> tuple[Any, Any]:
    """Return a model whose experts run on fp8moe, and its tokenizer. device: None for a GPU if there is one.

    Raises ValueError for a checkpoint that fp8moe or transformers cannot load, or that has no fast tokenizer.
    """
    import transformers

    from fp8moe.hf import load_model, register
    from fp8moe.hf.architecture import reason_of

    register()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    stored = find_format(directory)
    if not stored.loads:
        raise ValueError(f"{directory}: {stored.reason}")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        architecture = getattr(transformers, transformers.AutoConfig.from_pretrained(directory).architectures[0])
    except Exception as error:  # for broken files transformers raises exceptions of any type
        raise ValueError(f"{directory}: transformers cannot read it ({reason_of(error)})") from error
    if not tokenizer.is_fast:
        raise ValueError(f"{directory}: its tokenizer is not a fast one (tokenizer.json), which serve needs")
    if stored.scales != "none":
        return load_model(directory, dtype="auto", device=device), tokenizer
    options = {"dtype": "auto", "device_map": device, "experts_implementation": "fp8moe"}
    return architecture.from_pretrained(directory, **options).eval(), tokenizer


def make_decoder(model: Any, slots: int, max_length: int | None) -> Any:
    """Return a GraphDecoder for `slots` sequences; or warn and return None if only transformers can serve the model.

    Raises ValueError for a model that neither can serve, and for a `max_length` above the model's number of positions.
    """
    from fp8moe.decode import GraphDecoder
    from fp8moe.hf.architecture import reason_of

    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or MAX_LENGTH
    if (max_length or 0) > positions:
        raise ValueError(f"--max-length {max_length}: the model has {positions} positions")
    sizes = sorted({1, max(1, slots // 8), slots})
    try:
        decoder = GraphDecoder(model, batch_sizes=sizes, max_length=max_length or min(MAX_LENGTH, positions))
        decoder.run([])  # raises for a model whose sequences cannot share a batch
        return decoder
    except TypeError as error:
        raise ValueError(str(error)) from error
    except ValueError as error:
        if config.settings.batch_invariant:  # transformers' continuous batching is not invariant
            raise
        reason = str(error)
    try:
        model.init_continuous_batching(copy.deepcopy(model.generation_config))
    except Exception as error:
        raise ValueError(
            f"{reason}; nor does transformers' continuous batching serve it: {reason_of(error)}"
        ) from error
    warnings.warn(
        f"{reason}; transformers' continuous batching serves it, with fp8moe's experts, without --slots and "
        "--max-length, and requests cannot set sampling or stop strings",
        stacklevel=2,
    )
    return None


def _announce(options: argparse.Namespace, port: int, decoder: Any) -> None:
    """Print where the server listens, and its limits, now that clients can connect."""
    host = f"[{options.host}]" if ":" in options.host else options.host
    facts = {"model": options.model, "url": f"http://{host}:{port}/v1", "runs": "transformers"}
    if decoder is not None:
        facts |= {"runs": "GraphDecoder", "slots": decoder.batch_sizes[-1], "max_length": decoder.max_length}
    if options.json:
        print(json.dumps(facts), flush=True)
    elif not options.quiet:
        most = f", {facts['slots']} sequences of up to {facts['max_length']} tokens" if decoder else ""
        print(f"{options.model} at {facts['url']}{most}", flush=True)
