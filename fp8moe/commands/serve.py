"""`fp8moe serve`: an OpenAI-compatible server of one model."""

import argparse
import json
import socket
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from fp8moe.checkpoints.find_format import find_format
from fp8moe.runtime.progress import shown, still_running

PACKAGES = ("transformers", "fastapi", "uvicorn", "openai")
MAX_LENGTH = 4096
"""Most tokens of a sequence where --max-length does not say; fewer if the model has fewer positions."""
SECONDS_TO_FINISH = 10
"""How long answers may go on after Ctrl-C or SIGTERM. Then they are cancelled."""


def run(options: argparse.Namespace) -> int:
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise RuntimeError(f"{', '.join(missing)}: not installed, and needed to serve: pip install 'fp8moe[serve]'")
    import uvicorn
    from huggingface_hub import snapshot_download
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from fp8moe.integrations.serving import DecoderManager, make_app

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with _bind(options.host, options.port) as listener:
        with shown(not options.quiet), still_running("loading the model"):
            directory = Path(options.model) if Path(options.model).is_dir() else Path(snapshot_download(options.model))
            tokenizer = AutoTokenizer.from_pretrained(directory)
            if not tokenizer.is_fast:
                raise ValueError(
                    f"{options.model}: its tokenizer is not a fast one (tokenizer.json), which serve needs"
                )
            model = load(directory, options.device)
            decoder = make_decoder(model, options.slots, options.max_length)
        app = make_app(options.model, model, tokenizer, DecoderManager(decoder) if decoder else None)
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=SECONDS_TO_FINISH)
        listener.listen()
        _announce(options, listener, decoder)
        uvicorn.Server(config).run(sockets=[listener])
    return 0


def load(directory: Path, device: str | None) -> Any:
    """Load a model, its experts on fp8moe. device: None for a GPU if there is one."""
    from transformers import AutoModelForCausalLM

    from fp8moe.integrations.transformers import load_model, register

    register()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    stored = find_format(directory)
    if not stored.loads:
        raise ValueError(f"{directory}: {stored.reason}")
    if stored.scales != "none":
        return load_model(directory, dtype="auto", device=device)
    options = {"dtype": "auto", "device_map": device, "experts_implementation": "fp8moe"}
    return AutoModelForCausalLM.from_pretrained(directory, **options).eval()


def make_decoder(model: Any, slots: int, max_length: int | None) -> Any:
    """Return a GraphDecoder that serves so many sequences at once; None, with a warning, for a model that has none.

    Raises ValueError for what is no causal language model, and for more tokens than it has positions.
    """
    from fp8moe.integrations.decode import GraphDecoder

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
        warnings.warn(
            f"{error}; so transformers' continuous batching serves it with fp8moe's experts, --slots and --max-length "
            "do not apply, and requests cannot set sampling or stop strings",
            stacklevel=2,
        )
        return None


def _bind(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen at {host}, port {port}: {error.strerror}") from error
    return listener


def _announce(options: argparse.Namespace, listener: socket.socket, decoder: Any) -> None:
    """Say that clients can come."""
    host = f"[{options.host}]" if ":" in options.host else options.host
    facts = {"model": options.model, "url": f"http://{host}:{listener.getsockname()[1]}/v1", "runs": "transformers"}
    if decoder is not None:
        facts |= {"runs": "GraphDecoder", "slots": decoder.batch_sizes[-1], "max_length": decoder.max_length}
    if options.json:
        print(json.dumps(facts), flush=True)
    elif not options.quiet:
        most = f", {facts['slots']} sequences of up to {facts['max_length']} tokens" if decoder else ""
        print(f"{options.model} at {facts['url']}{most}", flush=True)
