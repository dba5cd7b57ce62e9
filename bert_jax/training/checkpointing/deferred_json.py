"""An Orbax item of JSON that is computed while the arrays of the same save are copied."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orbax.checkpoint as ocp
from etils import epath


class DeferredJsonHandler(ocp.JsonCheckpointHandler):
    """Saves the result of a function as JSON, which `ocp.args.JsonRestore` reads."""

    async def async_save(self, directory: epath.Path, item: Any = None, args: Any = None) -> Any:
        value = await asyncio.to_thread(args.compute)
        return await super().async_save(directory, args=ocp.args.JsonSave(value))


@ocp.args.register_with_handler(DeferredJsonHandler, for_save=True)
@dataclass
class DeferredJsonSave(ocp.args.CheckpointArgs):
    """Argument of a save: the function that returns the JSON. It runs in another thread before the save returns."""

    compute: Callable[[], Mapping[str, Any]]


@ocp.args.register_with_handler(DeferredJsonHandler, for_restore=True)
@dataclass
class DeferredJsonRestore(ocp.args.JsonRestore):
    """Argument of a restore, which Orbax requires of every handler."""
