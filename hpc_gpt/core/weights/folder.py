"""A folder of published weights, as `train.init` names it: config.json, and safetensors in one file or several.

Only headers are read, without torch or safetensors, so that `submit` and `doctor` can
compare a folder with a shape before anything is queued. The format is that of
https://github.com/huggingface/safetensors: eight bytes with the length of the header, the header in JSON, the tensors
one after the other.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from hpc_gpt.core.errors import ConfigError, OsErrorAs, read_hint
from hpc_gpt.core.files import json_object
from hpc_gpt.core.format import and_more, counted
from hpc_gpt.core.settings.model_shape import DEFAULTS, ModelShape
from hpc_gpt.core.weights.config import architecture_in, read_config
from hpc_gpt.core.weights.config_keys import PLAN_ONLY, model_type_of, read_config_json
from hpc_gpt.core.weights.names import stored_sizes

POSITIONS = "transformer.wpe.weight"
_OF_TOKENS = ("transformer.wte.weight", "model.embed_tokens.weight", "lm_head.weight")
CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_LONGEST_HEADER = 100 * 10**6  # safetensors' own limit
_SHOWN = 5
_BLOCK = 1 << 24
# Buffers that older files store with the weights: GPT-2's causal mask, the rotation's frequencies.
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
_AGAIN = "download the folder again, or name another"
# {field of a shape in which a run may differ from its folder: the reason}. Every other field is compared.
FREE = {
    "seq": "the length to train; the rows of learned positions are compared with it",
    "vocab_multiple": "it pads our embedding alone",
    "router_dtype": "no class has this key",
    "mtp_layers": "layers for later tokens, which transformers' classes do not load either",
}
# {field that is None if it follows from others: the property that has its value}.
_VALUES = {"kv_heads": "key_heads", "head_dim": "head_width", "ffn": "mlp_width"}


@dataclass(frozen=True)
class StoredWeight:
    """The place of a weight: its file, type, size, and the first byte in the file and the byte after its last."""

    file: Path
    dtype: str
    size: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class WeightsFolder:
    """The headers of a folder. `weights`: by the names of transformers' class; `stored`: {that name: the name in the
    file}, which lacks the prefix of the class in files of a model without its head.

    `identity` has what identifies the folder by its headers: the SHA-256 of config.json and index, the size and the
    SHA-256 of the header of each file, and the `architecture`.
    """

    path: Path
    weights: dict[str, StoredWeight]
    stored: dict[str, str]
    identity: dict[str, Any]

    @cached_property
    def is_fused(self) -> bool:
        """Whether one tensor has a matrix of all experts of a layer."""
        return any(name.endswith(".experts.gate_up_proj") for name in self.weights)


def read_folder(path: Path) -> WeightsFolder:
    """Reads the headers of a folder. Raises ConfigError if a file is missing, damaged or in another format.

    Like transformers, it reads model.safetensors even if there is also an index.
    """
    check_folder(path)
    if (path / ADAPTER).is_file():
        raise ConfigError(
            f"{path} has {ADAPTER}: transformers adds an adapter's weights to the others if peft is installed",
            "save the merged model: model.merge_and_unload().save_pretrained(FOLDER)",
        )
    architecture = architecture_in(path)
    if reason := PLAN_ONLY.get(model_type_of(read_config_json(path / CONFIG), path / CONFIG)):
        raise ConfigError(
            f"{path} has weights of {architecture}, which cannot be trained here: {reason}",
            f"hpc-gpt plan --model {path} plans it; train from weights of another model",
        )
    identity: dict[str, Any] = {"path": str(path), "config": _sha256(_read(path / CONFIG)), "index": None, "files": {}}
    identity["architecture"] = architecture
    listed: dict[str, str] | None = None
    if (path / SINGLE).is_file():
        names = [SINGLE]
    elif (path / INDEX).is_file():
        index = _read(path / INDEX)
        identity["index"] = _sha256(index)
        listed = _weight_map(path / INDEX, index)
        names = sorted(set(listed.values()))
        if missing := [name for name in names if not (path / name).is_file()]:
            and_others = and_more(len(missing), 1, ", and ")
            raise ConfigError(f"{path / INDEX} names {missing[0]}, which is not there{and_others}", _AGAIN)
    else:
        others = sorted(one.name for one in path.iterdir() if one.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        what = f"only {others[0]}, a pickle, which may run code" if others else "no weights"
        raise ConfigError(f"{path} has no {SINGLE} and no {INDEX}: {what}", "save it with safetensors: transformers "
                          "writes them with model.save_pretrained(FOLDER)")  # fmt: skip
    read: dict[str, StoredWeight] = {}
    for name in names:
        try:
            header, weights = _read_header(path / name)
        except ConfigError as fault:
            raise ConfigError(str(fault), _second_file(path) or fault.hint) from None
        identity["files"][name] = {"size": (path / name).stat().st_size, "header": header}
        read |= weights
    for key, file in (listed or {}).items():
        if key not in read or read[key].file.name != file:
            raise ConfigError(f"{path / INDEX}: {key} should be in {file}, but is not", _AGAIN)
    stored = _with_prefix([name for name in read if not name.endswith(_BUFFERS)])
    return WeightsFolder(path, {name: read[stored_name] for name, stored_name in stored.items()}, stored, identity)


def check_folder(path: Path) -> None:
    """Raises ConfigError if train.init does not name a folder on this machine."""
    if path.is_dir():
        return
    what = "but that is a file" if path.is_file() else "but there is no such folder here"
    raise ConfigError(f"train.init is {path}, {what}", "name a folder with config.json and safetensors, on a disk "
                      "that the nodes see; nothing is downloaded")  # fmt: skip


def check_weights(folder: WeightsFolder, shape: ModelShape) -> None:
    """Raises ConfigError if the folder's model differs from `shape`: in its config.json, its names or its sizes."""
    theirs = read_config(folder.path, shape.seq)
    differ = [
        f"{name} is {_shown(other)} there, {_shown(ours)} here" for name, ours, other in _differing(shape, theirs)
    ]
    if differ:
        by_config = f'set model.hf = "{folder.path}", and no other key of [model] but seq'
        raise _of_another_model(folder, differ, by_config)
    expected = stored_sizes(shape, folder.is_fused)
    # Layers for later tokens: transformers' classes do not load them either.
    mtp = tuple(f"model.layers.{shape.layers + number}." for number in range(theirs.mtp_layers))
    for name, weight in folder.weights.items():
        if name.startswith(mtp):
            pass
        elif name == "lm_head.weight" and shape.tied and name not in expected:
            embedding = folder.weights.get("model.embed_tokens.weight", folder.weights.get("transformer.wte.weight"))
            if embedding is None or not _are_equal(weight, embedding):
                differ.append("lm_head.weight is not the embedding, to which the head is tied")
        elif name not in expected:
            differ.append(f"{name} is not a weight of this model")
        elif name == POSITIONS and weight.size[1:] == expected[name][1:] and weight.size[0] >= shape.seq:
            pass  # a shorter sequence uses the first rows
        elif name == POSITIONS and weight.size[1:] == expected[name][1:]:
            raise ConfigError(
                f"{folder.path} has {weight.size[0]:,} learned positions, but model.seq is {shape.seq:,}",
                f"use --seq {weight.size[0]} or less: its first rows are taken",
            )
        elif weight.size != expected[name]:
            differ.append(f"{name} is {list(weight.size)} there, {list(expected[name])} here")
    differ = [f"{name} is not there" for name in expected if name not in folder.weights] + differ
    if differ:
        raise _of_another_model(folder, differ, _second_file(folder.path) or _by_rows(folder, shape))


def _second_file(path: Path) -> str:
    """The advice if a single file, which is read, lies beside the files of an index; empty if none does."""
    beside = (path / SINGLE).is_file() and (path / INDEX).is_file()
    return f"move {path / SINGLE} away, so that the files of {INDEX} are read" if beside else ""


def _by_rows(folder: WeightsFolder, shape: ModelShape) -> str:
    """The advice if the weights differ from a shape that their own config.json gives, too."""
    rows = {weight.size[0] for name, weight in folder.weights.items() if name in _OF_TOKENS} - {shape.vocab}
    what = f"vocab_size to {rows.pop()}" if len(rows) == 1 else "the size that these lines show"
    return (
        f"{folder.path / CONFIG} belongs to other weights: change {what} there, or take the weights that it belongs to"
    )


def _of_another_model(folder: WeightsFolder, differ: list[str], hint: str) -> ConfigError:
    return ConfigError(
        f"{folder.path} has the weights of another model, with {counted(len(differ), 'difference')}:\n"
        + "\n".join(differ[:_SHOWN])
        + and_more(len(differ), _SHOWN, "\nand "),
        hint,
    )


def _differing(ours: ModelShape, theirs: ModelShape) -> Iterator[tuple[str, Any, Any]]:
    """Yields (field, its value in our shape, in theirs) of each field that differs and may not."""
    for name in DEFAULTS:
        if name in FREE or (name == "ffn" and theirs.is_mixture and not theirs.dense_layers):
            continue
        values = [getattr(shape, _VALUES.get(name, name)) for shape in (ours, theirs)]
        if values[0] != values[1]:
            yield name, values[0], values[1]


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)


def _read(file: Path) -> bytes:
    with OsErrorAs(ConfigError, str(file), partial(read_hint, of_contents=_AGAIN)):
        return file.read_bytes()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _weight_map(file: Path, content: bytes) -> dict[str, str]:
    listed = (json_object(content) or {}).get("weight_map")
    if isinstance(listed, dict) and all(isinstance(name, str) and Path(name).name == name for name in listed.values()):
        return listed
    raise ConfigError(f"{file} is not an index of safetensors: it lacks weight_map, or names no files", _AGAIN)


def _read_header(file: Path) -> tuple[str, dict[str, StoredWeight]]:
    """Returns (SHA-256 of the header, the weights). Raises ConfigError for an incomplete file."""
    with OsErrorAs(ConfigError, str(file), partial(read_hint, of_contents=_AGAIN)), file.open("rb") as opened:
        size, length = file.stat().st_size, int.from_bytes(opened.read(8), "little")
        if not 2 <= length <= min(_LONGEST_HEADER, size - 8):
            raise ConfigError(f"{file} is damaged: its header would have {length} bytes, the file {size}", _AGAIN)
        header = opened.read(length)
    weights, data = {}, 8 + length
    try:
        for name, entry in json.loads(header).items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            weight = StoredWeight(file, entry["dtype"], tuple(entry["shape"]), data + begin, data + end)
            if weight.dtype not in _BYTES:
                readable = ", ".join(_BYTES)
                raise ConfigError(f"{file}: {name} has type {weight.dtype}, but only {readable} can be read", _AGAIN)
            if end - begin != math.prod(weight.size) * _BYTES[weight.dtype]:
                raise ConfigError(f"{file} is damaged: {name} has {end - begin} bytes, its size asks for another "
                                  "number", _AGAIN)  # fmt: skip
            weights[name] = weight
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as fault:
        if isinstance(fault, ConfigError):
            raise
        raise ConfigError(f"{file} is damaged: its header is not the JSON of safetensors", _AGAIN) from None
    if (end := max((weight.end for weight in weights.values()), default=data)) != size:
        raise ConfigError(f"{file} is cut off or damaged: its header asks for {end} bytes, it has {size}", _AGAIN)
    return _sha256(header), weights


def _with_prefix(names: list[str]) -> dict[str, str]:
    """{name with the prefix of its class: stored name}."""
    for prefix, embedding in (("transformer.", "wte.weight"), ("model.", "embed_tokens.weight")):
        if embedding in names:
            return {name if name.startswith("lm_head.") else prefix + name: name for name in names}
    return {name: name for name in names}


def _are_equal(one: StoredWeight, other: StoredWeight) -> bool:
    if (one.dtype, one.size) != (other.dtype, other.size):
        return False
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.begin)
        second.seek(other.begin)
        left = one.end - one.begin
        while left:
            count = min(_BLOCK, left)
            if first.read(count) != second.read(count):
                return False
            left -= count
    return True


def check_unchanged(folder: WeightsFolder, then: dict[str, Any]) -> None:
    """Raises ConfigError if the folder does not match its entry in provenance.json. Other numbers in files of the same
    headers and sizes are not seen."""
    now, before = folder.identity, then.get("files", {})
    if then.get("index") is not None and SINGLE in now["files"] and SINGLE not in before:
        changed = [f"{SINGLE} is used instead of {INDEX}, from which the run was submitted"]
    else:
        changed = [name for key, name in (("config", CONFIG), ("index", INDEX)) if then.get(key) != now[key]]
        for name in {**before, **now["files"]}:
            files = [identity.get(name, {}) for identity in (before, now["files"])]
            if any(files[0].get(key) != files[1].get(key) for key in ("size", "header")):
                changed.append(name)
    if changed:
        raise ConfigError(
            f"{folder.path} has changed since the run was submitted: {_listed(changed)}",
            "submit again to begin from what is there now",
        )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + and_more(len(names), _SHOWN, ", and ", "other")
