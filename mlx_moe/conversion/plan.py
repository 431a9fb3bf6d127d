"""All files of a pack before the first byte is written: their tensors, sizes and jobs, and config.json."""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from custom_kernels.ggml_blocks import format_by_name
from mlx_moe import __version__
from mlx_moe.conversion.choices import LEAST_MEMORY, LEAVE, Choices, Targets, targets
from mlx_moe.conversion.imatrix import Importances
from mlx_moe.conversion.jobs import Job, bits_of, dense_job, expert_job, group_size, is_matrix, table_job
from mlx_moe.conversion.source import Dense, LayerSource, Source
from mlx_moe.formats.pack import FORMAT_VERSION, LAYOUT, RecordLayout, TableReference, TensorSpec
from mlx_moe.formats.pack.writer import NO_CHECKSUM, header

INDEX = "model.safetensors.index.json"
_LAYER = re.compile(r"(model\.layers\.\d+|mtp)\.")
_BATCH_BYTES = 2 << 20  # the fastest: larger copies leave the processor's cache


@dataclass(frozen=True)
class PlannedFile:
    """One weight file: its jobs, whose tensors follow each other, and metadata beside the pack's own."""

    name: str
    jobs: tuple[Job, ...]
    metadata: Mapping[str, str]

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Its tensors, in order."""
        return tuple(spec for job in self.jobs for spec in job.specs)

    @cached_property
    def header_text(self) -> bytes:
        """The header, with empty checksums."""
        specs = self.specs
        return header(specs, self.metadata, [NO_CHECKSUM] * len(specs))

    @property
    def data_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(job.nbytes for job in self.jobs)

    @property
    def file_bytes(self) -> int:
        """Bytes of the whole file."""
        return len(self.header_text) + self.data_bytes

    def cut(self, done: int) -> int:
        """The last place at or before ``done`` bytes of data from which the work can go on."""
        start = 0
        for job in self.jobs:
            if done < start + job.nbytes:
                return start + ((done - start) // job.unit_bytes * job.unit_bytes if job.unit_bytes else 0)
            start += job.nbytes
        return start


@dataclass(frozen=True)
class Plan:
    """A conversion: what it writes (``files``, ``index`` and ``config``), and what it would go on with (``key``)."""

    source: Source
    targets: Targets
    files: tuple[PlannedFile, ...]
    index: dict[str, Any]
    config: dict[str, Any]
    key: str

    @property
    def total_bytes(self) -> int:
        """Of all weight files."""
        return sum(file.file_bytes for file in self.files)


def make_plan(source: Source, choices: Choices, importances: Importances | None = None) -> Plan:
    """Raises ConfigError, naming the flag, when a choice does not fit the model."""
    chosen = targets(source, choices)
    batch = min(_BATCH_BYTES, (choices.memory_bytes - LEAST_MEMORY) // 8)
    dense = _dense_files(source, chosen)
    experts = _expert_files(source, chosen, importances or {}, batch)
    files = (*dense, *experts, *_table_files(source, chosen, max(batch, 1 << 20)))
    config = _config(source, chosen)
    return Plan(source, chosen, files, _index(dense), config, _key(source, files, config, importances or {}))


def _dense_files(source: Source, chosen: Targets) -> list[PlannedFile]:
    """A file for what stands outside of layers, then one per layer, then one for the draft layer."""
    groups: dict[str, list[Dense]] = defaultdict(list)
    for weight in sorted(source.dense, key=lambda weight: weight.name):
        match = _LAYER.match(weight.name)
        groups[match[1] if match else ""].append(weight)
    keys = sorted(groups, key=lambda key: (key == "mtp", int(key.rsplit(".", 1)[-1]) if "." in key else -1))
    names = [f"model-{i + 1:05d}-of-{len(keys):05d}.safetensors" for i in range(len(keys))]
    return [_dense_file(name, groups[key], chosen) for name, key in zip(names, keys, strict=True)]


def _dense_file(name: str, weights: Sequence[Dense], chosen: Targets) -> PlannedFile:
    """Wide types come first, so that every tensor is aligned to its type."""
    made = [dense_job(weight, chosen.dense) for weight in weights]
    made.sort(key=lambda item: ("F32", "U32", "BF16", "F16", "U8").index(item[0].specs[0].dtype))
    blocks = {job.specs[0].name: kept for job, kept in made if kept is not None}
    return PlannedFile(name, tuple(job for job, _ in made), {"blocks": json.dumps(blocks)} if blocks else {})


def record_layout(source: Source, chosen: Targets, layer: LayerSource) -> RecordLayout:
    """The record that a layer's experts become."""
    gate, up, down = (format_by_name(name) for name in layer.formats)
    formats = (chosen.gate_up or gate, chosen.gate_up or up, chosen.down or down)
    return RecordLayout.of(formats, source.config.hidden_size, source.config.moe_intermediate_size)


def _expert_files(source: Source, chosen: Targets, importances: Importances, batch: int) -> list[PlannedFile]:
    """A file per layer."""
    files = []
    for i, layer in enumerate(source.layers):
        layout = record_layout(source, chosen, layer)
        job = expert_job(layer, layout, importances, batch)
        records = {job.specs[0].name: layout.to_json(layer.name)}
        name = f"experts-{i + 1:05d}-of-{len(source.layers):05d}.safetensors"
        files.append(PlannedFile(name, (job,), {"records": json.dumps(records)}))
    return files


def _table_files(source: Source, chosen: Targets, batch: int) -> list[PlannedFile]:
    if source.table is None or chosen.table == LEAVE:
        return []
    kept = chosen.table or format_by_name(source.table[0].format)
    layer = source.config.ple_layer_ids[0] - 1
    job = table_job(f"model.layers.{layer}.ple.ple_embedding.ngram_embedding.rows", source.table, kept, batch)
    tables = {job.specs[0].name: {"format": kept.name, "width": source.table[0].shape[1]}}
    return [PlannedFile("ngram.safetensors", (job,), {"tables": json.dumps(tables)})]


def _index(dense: Sequence[PlannedFile]) -> dict[str, Any]:
    """MLX's index, of the dense files alone."""
    weight_map = {spec.name: file.name for file in dense for spec in file.specs}
    total = sum(file.data_bytes for file in dense)
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


def _config(source: Source, chosen: Targets) -> dict[str, Any]:
    out = {key: value for key, value in source.raw.items() if key != "quantization"}
    out["pack"] = {"format_version": FORMAT_VERSION, "layout": LAYOUT}
    if chosen.table == LEAVE:
        out["pack"]["ngram"] = asdict(TableReference.to_table(source.place))
    matrices = [weight for weight in source.dense if is_matrix(weight)]
    packed = {weight.name: bits for weight in matrices if (bits := bits_of(weight, chosen.dense))}
    if packed:
        groups = {weight.name: group_size(weight) for weight in matrices}
        common = max(set(groups[name] for name in packed), key=[groups[name] for name in packed].count)
        default = {"group_size": common, "bits": int(chosen.dense), "mode": "affine"}
        section: dict[str, Any] = dict(default)
        for name in sorted(groups):
            path = name.removesuffix(".weight")
            if name not in packed:
                section[path] = False
            elif groups[name] != common:
                section[path] = {**default, "group_size": groups[name]}
        out["quantization"] = section
    return dict(sorted(out.items()))


def _key(source: Source, files: Sequence[PlannedFile], config: Mapping[str, Any], importances: Importances) -> str:
    """Equal for conversions that give the same bytes."""
    digest = hashlib.sha256(f"{__version__} {json.dumps(config)}".encode())
    for path in source.files:
        state = path.stat()
        digest.update(f"{path.absolute()} {state.st_size} {state.st_mtime_ns}".encode())
    for file in files:
        digest.update(file.header_text)
    for name, array in sorted(importances.items()):
        digest.update(name.encode() + memoryview(array))
    return digest.hexdigest()
