"""Find a checkpoint by its directory or, downloading it, by its name on the Hugging Face Hub."""

import os
import re
from pathlib import Path

from tqdm import tqdm

from fp8moe.runtime.progress import is_shown

_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")
_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.bpe", "*.py", "*.md")
_LICENSES = ("LICENSE*", "NOTICE*", "USE_POLICY*")
_OTHER_COPIES = ("*/*.safetensors", "*/*.json", "*/*.model", "*/*.py", "consolidated*")
"""Files not to download: copies of the weights for other programs, in releases of GPT-OSS, Llama and Mistral."""


class NoCheckpoint(ValueError):
    """Neither a directory nor a model on the Hub has this name; the message gives the reason."""


class _NoBar(tqdm):
    """A progress bar that shows nothing."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs | {"disable": True})


def checkpoint_directory(checkpoint: str | os.PathLike) -> Path:
    """Return the directory of a checkpoint: ``checkpoint`` itself if it exists, else the Hub's model of this name.

    Downloads the configuration, tokenizer and safetensors files that huggingface_hub does not have in its cache.
    huggingface_hub's environment variables apply: HF_HUB_OFFLINE, HF_ENDPOINT, HF_HOME and HF_TOKEN.

    Raises NoCheckpoint if there is neither such a directory nor such a model.
    """
    path = Path(checkpoint)
    if path.exists():
        return path
    nothing = "there is no such directory"
    if not _NAME.fullmatch(str(path)):
        raise NoCheckpoint(nothing + "; a name on the Hugging Face Hub is OWNER/MODEL" * (len(path.parts) == 1))
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, OfflineModeIsEnabled
    from huggingface_hub.errors import RepositoryNotFoundError as NotFound

    bar = {} if is_shown() else {"tqdm_class": _NoBar}
    try:
        return Path(
            snapshot_download(
                path.as_posix(), allow_patterns=[*_FILES, *_LICENSES], ignore_patterns=[*_OTHER_COPIES], **bar
            )
        )
    except GatedRepoError as error:
        why = "the model of this name on the Hugging Face Hub is gated: ask for access there, then set HF_TOKEN"
        raise NoCheckpoint(f"{nothing}, and {why}") from error
    except NotFound as error:
        why = "no model of this name on the Hugging Face Hub that can be read from here (HF_TOKEN opens private ones)"
        raise NoCheckpoint(f"{nothing}, and {why}") from error
    except LocalEntryNotFoundError as error:
        offline = isinstance(error.__cause__, OfflineModeIsEnabled)
        why = "HF_HUB_OFFLINE is set" if offline else "the Hugging Face Hub cannot be reached"
        raise NoCheckpoint(f"{nothing}, no whole model of this name in the Hub's cache, and {why}") from error
    except (OSError, ValueError) as error:
        first = str(error).strip().partition("\n")[0]
        why = f"the Hugging Face Hub did not send a model of this name: {first}"
        raise NoCheckpoint(f"{nothing}, and {why}") from error
