"""Names of the Hugging Face Hub in place of directories, against a small hub of its own."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest
import torch

from fp8moe.cli import main
from fp8moe.weights import (
    CheckpointError,
    convert_checkpoint,
    find_format,
    inspect_checkpoint,
    load_fp8_checkpoint,
    quantize_checkpoint,
)
from tests.small_checkpoints import unquantized, write

NAME, GATED, COMMIT = "owner/small-moe", "owner/gated", "0123456789abcdef" * 2 + "01234567"
NEITHER = "there is no such directory, and no model of this name on the Hugging Face Hub"


class Hub(BaseHTTPRequestHandler):
    """The routes that snapshot_download asks for."""

    root: Path
    sent: list[str]

    def do_HEAD(self):
        self.answer(False)

    def do_GET(self):
        self.answer(True)

    def answer(self, body):
        status, headers, content = 200, {"X-Repo-Commit": COMMIT}, b""
        files = {path.relative_to(self.root).as_posix(): path for path in self.root.rglob("*") if path.is_file()}
        place = self.path.partition("?")[0]
        file = place.removeprefix(f"/{NAME}/resolve/{COMMIT}/")
        if place == f"/api/models/{NAME}/revision/main":
            content = json.dumps({"id": NAME, "sha": COMMIT, "siblings": []}).encode()
        elif place == f"/api/models/{NAME}/tree/{COMMIT}":
            sizes = [{"type": "file", "path": name, "size": 1, "oid": "0"} for name in files]
            content = json.dumps(sizes).encode()
        elif file in files:
            content = files[file].read_bytes()
            headers["ETag"] = f'"{hashlib.sha256(content).hexdigest()}"'
            self.sent += [file] if body else []
        else:
            status, code = (403, "GatedRepo") if GATED in place else (404, "RepoNotFound")
            headers["X-Error-Code"] = code
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with one model, and an empty cache; what is asked for later is in its `sent`."""
    root = tmp_path / "on the hub"
    write(root, unquantized(), shards=2, config={})
    (root / "tokenizer.json").write_text("{ }")  # contents that are equal are sent once
    (root / "consolidated.safetensors").write_text("of another program")
    (root / "original").mkdir()
    (root / "original" / "model.safetensors").write_text("of another program")
    (root / "pytorch_model.bin").write_text("a pickle")
    handler = type("OneHub", (Hub,), {"root": root, "sent": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    # What HF_ENDPOINT, HF_HUB_CACHE and HF_HUB_OFFLINE set when huggingface_hub is imported.
    endpoint, files = f"http://127.0.0.1:{server.server_port}", "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + files)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    yield handler
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_name_is_downloaded_once_and_then_read_from_the_cache(hub, tmp_path, monkeypatch, capsys):
    assert main(["quantize", "--quiet", NAME, "fp8"]) == 0
    assert capsys.readouterr().err.count("\n") == 1  # the warning of a config.json without a model_type
    left_out = {"consolidated.safetensors", "original", "pytorch_model.bin"}
    assert sorted(hub.sent) == sorted({path.name for path in hub.root.iterdir()} - left_out)
    hub.sent.clear()
    quantize_checkpoint(hub.root, "from files")
    assert {path.name for path in Path("fp8").iterdir()} == {path.name for path in Path("from files").iterdir()}
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert find_format(NAME).name == "bf16" and inspect_checkpoint(NAME).files == 2
    assert hub.sent == []


def test_every_reader_takes_a_name(hub, tmp_path):
    pytest.importorskip("transformers")
    from fp8moe.hf import load_model
    from tests.decode_models import tiny_mixtral

    tiny_mixtral().save_pretrained(tmp_path / "bfloat16")
    quantize_checkpoint(tmp_path / "bfloat16", tmp_path / "fp8")
    hub.root = tmp_path / "fp8"
    assert inspect_checkpoint(NAME).problems == []
    models = load_model(NAME), load_model(hub.root)
    for model in models[0], load_model(hub.root, dtype="float32"):
        load_fp8_checkpoint(model, NAME)
    convert_checkpoint(NAME, tmp_path / "converted")
    first, second = (list(model.state_dict().values()) for model in models)
    assert all(torch.equal(one.float(), two.float()) for one, two in zip(first, second, strict=True))


def test_a_directory_of_the_same_name_wins(hub, tmp_path):
    write(tmp_path / NAME, unquantized(), config={})
    assert inspect_checkpoint(NAME).files == 1
    assert hub.sent == []


@pytest.mark.parametrize("command", [["inspect"], ["quantize", "dst"], ["convert", "dst"], ["serve", "--port=0"]])
def test_a_name_that_is_neither_is_refused(hub, command):
    name, *others = command
    with pytest.raises(SystemExit, match=rf"^fp8moe {name}: owner/none is not a checkpoint: {NEITHER}.*\)$"):
        main([name, "owner/none", *others])


def test_what_cannot_be_read_is_said(hub, monkeypatch):
    with pytest.raises(CheckpointError, match="is gated: ask for access there, then set HF_TOKEN$"):
        inspect_checkpoint(GATED)
    with pytest.raises(CheckpointError, match="no such directory; a name on the Hugging Face Hub is OWNER/MODEL$"):
        inspect_checkpoint("none")
    for path in ("../none", "./a/b/none", "/none/none"):
        with pytest.raises(CheckpointError, match="no such directory$"):
            inspect_checkpoint(path)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(CheckpointError, match="in the Hub's cache, and the Hugging Face Hub cannot be reached$"):
        inspect_checkpoint(NAME)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="in the Hub's cache, and HF_HUB_OFFLINE is set$"):
        inspect_checkpoint(NAME)
