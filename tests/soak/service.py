"""The service of a soak: its files, and a start of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from launch.adapter_kinds import AdapterKind
from launch.planning import plan_capacity
from tests.e2e.service import Server
from tests.soak.material import CONTEXT, RANKS, Variant, make_broken, make_model, make_variants
from tests.soak.options import SoakOptions
from tests.soak.traffic import BASE
from tp_engine.config import EngineConfig
from tp_engine.models import ModelSpec

KEY, ADMIN_KEY = "sk-client", "sk-admin"


@dataclass(frozen=True, kw_only=True, slots=True)
class Files:
    """All files of a soak, in one directory."""

    directory: Path
    variants: list[Variant]

    @classmethod
    def make(cls, directory: Path, options: SoakOptions) -> Files:
        """Write the model, the adapters and the keys."""
        make_model(directory / "model")
        count = options.adapters + options.spare
        variants = make_variants(directory / "adapters", count, options.seed)
        make_broken(directory / "adapters" / "broken")
        (directory / "keys").write_text(KEY)
        (directory / "admin").write_text(ADMIN_KEY)
        return cls(directory=directory, variants=variants)

    @property
    def model(self) -> Path:
        """The base."""
        return self.directory / "model"

    @property
    def store(self) -> Path:
        """Where the service keeps adapters."""
        return self.directory / "store"

    @property
    def broken(self) -> Path:
        """An adapter that must be refused."""
        return self.directory / "adapters" / "broken"


def start(files: Files, options: SoakOptions, *, pages: int, port: int = 0) -> Server:
    """Start the service, which notes its steps."""
    directory = files.directory
    return Server(
        directory,
        files.model,
        f"--served-model-name={BASE}",
        f"--num-pages={pages}",
        f"--max-num-seqs={options.clients}",
        f"--api-key-file={directory / 'keys'}",
        f"--admin-key-file={directory / 'admin'}",
        f"--adapter-root={directory / 'adapters'}",
        f"--adapter-store={files.store}",
        f"--adapter-host-memory={options.host_memory}",
        "--flush-interval=5",
        ranks=options.ranks,
        port=port,
        key=KEY,
        script="tests/soak/serve.py",
        environment={"SOAK_STEPS": str(directory), "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0"},
    )


def arena_pages(model: Path, options: SoakOptions) -> int:
    """Pages for so many average adapters, and the requests' keys and values beside them."""
    spec = ModelSpec.from_directory(model)
    config = EngineConfig(model=str(model), dtype="float32", num_pages=1)
    capacity = plan_capacity(
        spec,
        config.resolve(cuda=False, model_positions=CONTEXT),
        options.ranks,
        memory=0,
        kinds=[AdapterKind(rank=rank, count=1) for rank in RANKS],
        kv_tokens=0,
    )
    average = sum(need.pages for need in capacity.kinds) / len(RANKS)
    kv = options.clients * capacity.layout.blocks(CONTEXT // 4)
    return round(options.resident * average) + kv
