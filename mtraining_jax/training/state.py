"""The training state: all arrays of a checkpoint."""

import dataclasses
import math
from collections.abc import Collection, Container
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mtraining_jax.callbacks import State
from mtraining_jax.config import Config
from mtraining_jax.models.huggingface.read import load_parameters, load_peft
from mtraining_jax.models.lora.adapters import is_adapter
from mtraining_jax.models.parameters import LAYERS
from mtraining_jax.models.sharding import lm_head_name, lm_head_spec, over_replicas
from mtraining_jax.models.sharding import parameter_names as names_of
from mtraining_jax.models.spec import ModelSpec
from mtraining_jax.models.transformer import (
    abstract_state,
    graph_definition,
    init_model,
    param_shardings,
)
from mtraining_jax.training.optimizer import Parameters, make_optimizer, trainable_names
from mtraining_jax.utils.errors import UserError

# Fixed, because key data of another `jax_default_prng_impl` has another shape in checkpoints.
PRNG_IMPL = "threefry2x32"
PINNED_HOST = "pinned_host"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The training state, a pytree."""

    step: Array  # int32, steps taken so far, including skipped ones: the number of batches read
    parameters: Parameters  # those of a checkpoint: adapters if there are any, else all
    opt_state: optax.OptState  # of the trained parameters
    skipped: Array  # int32, number of skipped updates so far
    skipped_in_row: Array  # int32, the same since the last applied one
    rng: Array  # uint32 [2], key data (`PRNG_IMPL`) for the random numbers of a step
    base: Parameters = dataclasses.field(default_factory=dict)  # frozen, of adapters; never saved

    @property
    def model(self) -> Parameters:
        """All parameters of the model."""
        return self.parameters | self.base


class StateBuilder:
    """Builds training states of one run on its mesh, as arrays or as shapes.

    `optimizer` replaces that of the configuration.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh | AbstractMesh,
        optimizer: optax.GradientTransformation | None = None,
    ) -> None:
        spec = ModelSpec.from_config(config.model)
        trainable = () if config.lora.spec else config.optimizer.trainable
        self.spec = dataclasses.replace(spec, lora=config.lora.spec, trainable=trainable)
        self.graphdef = graph_definition(self.spec)
        self.optimizer = optimizer or make_optimizer(config.optimizer)
        self.own_rate = optimizer is not None  # its updates have their sign and learning rate
        self._config, self.fsdp = config, config.parallel.fsdp
        self._offloads = config.optimizer.offload
        self.mesh: Any = mesh  # abstract for planning
        self.lm_head_name = lm_head_name(self.spec)
        self.lm_head_spec = lm_head_spec(self.spec, self.mesh, self.fsdp)
        abstract = abstract_state(self.spec)
        self._structure = jax.tree.structure(abstract)
        self._names = tuple(jax.tree.leaves(names_of(abstract)))
        self._shapes = self.flatten(abstract)
        self._shardings = self.flatten(param_shardings(self.spec, self.mesh, self.fsdp))
        self._adapters = frozenset(filter(is_adapter, self._names))
        trainable = trainable_names(self._names, config.optimizer.trainable)
        self.trainable = self._adapters or trainable

    def flatten(self, state: nnx.State) -> dict[str, Any]:
        return dict(zip(self._names, jax.tree.leaves(state), strict=True))

    def unflatten(self, parameters: dict[str, Any]) -> nnx.State:
        return jax.tree.unflatten(self._structure, [parameters[name] for name in self._names])

    def split(self, parameters: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Splits parameters into trained and frozen ones."""
        return _split(parameters, self.trainable)

    def count_parameters(self) -> tuple[int, int]:
        sizes = {name: math.prod(x.shape) for name, x in self._shapes.items()}
        return sum(sizes.values()), sum(sizes[name] for name in self.trainable)

    def abstract(self) -> TrainState:
        """Returns a `TrainState` of `jax.ShapeDtypeStruct` with shardings."""
        everywhere = NamedSharding(self.mesh, P())

        def abstract_leaf(path: tuple[Any, ...], x: Any) -> jax.ShapeDtypeStruct:
            # Parameters and their moments are dicts by name; all else is replicated.
            name = getattr(path[-1], "key", "")
            sharding = everywhere
            if name in self._shapes and x.shape == self._shapes[name].shape:
                sharding = self._shardings[name]
            on_host = self._offloads == "all" and name.startswith(LAYERS)
            if name and path[0].name == "opt_state":
                sharding = over_replicas(sharding, x.shape)
                on_host = bool(self._offloads)
            sharding = _on_host(sharding) if on_host else sharding
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        shapes = jax.eval_shape(self._around, self._shapes)
        return jax.tree_util.tree_map_with_path(abstract_leaf, shapes)

    def shardings(self) -> TrainState:
        return jax.tree.map(lambda x: x.sharding, self.abstract())

    def fresh(self) -> TrainState:
        """Builds the state before the first step; its values do not depend on the mesh."""
        start = self._config.lora.init_from
        if start is not None and self._adapters:
            base = self.base()
            parameters = base | load_peft(start, self.spec, self._wanted(self._adapters), base)
        elif self._config.model.init_from is None:
            parameters = self._drawn()
        else:
            parameters = self.base() | self._drawn(self._adapters)
        return self._initial_state(parameters)

    def continued(self, state: State) -> TrainState:
        """Builds the state before the first step from the arrays of another run.

        Raises:
            UserError: they are of another model or optimizer.
        """
        abstract = self.abstract()
        for name in sorted(abstract.model.keys() | state.model.keys()):
            both = state.model, abstract.model
            has, needs = (getattr(x.get(name), "shape", None) for x in both)
            if has != needs:
                raise UserError(
                    f"fit(state=...) is of another model: its parameter {name} has shape {has}, "
                    f"but {needs} is needed"
                )
        if not jax.tree.leaves(state.opt_state):
            model = {name: _cast(x, abstract.model[name]) for name, x in state.model.items()}
            return self._initial_state(model)
        shapes = [jax.tree.map(lambda x: x.shape, x.opt_state) for x in (state, abstract)]
        if shapes[0] != shapes[1]:
            raise UserError(
                "fit(state=...) has the state of another optimizer: replace its opt_state by () to "
                "begin with a new one"
            )
        new = dataclasses.replace(
            abstract, parameters=state.parameters, base=state.base, opt_state=state.opt_state
        )
        zero = np.zeros((), np.int32)
        rng = jax.random.key_data(jax.random.key(self._config.run.seed, impl=PRNG_IMPL))
        new = dataclasses.replace(new, step=zero, skipped=zero, skipped_in_row=zero, rng=rng)
        # The other run may have had frozen matrices, or moments, of another dtype.
        new = jax.tree.map(_cast, new, abstract)
        return jax.tree.map(lambda x, place: jax.device_put(x, place.sharding), new, abstract)

    def _initial_state(self, parameters: Parameters) -> TrainState:
        """The state before the first step, with these parameters, which are donated."""
        abstract, opt_state = self.abstract(), ()
        places = {name: x.sharding for name, x in abstract.model.items()}
        parameters = jax.device_put(parameters, places)
        if self._offloads:  # never on the device, where they may not fit
            opt_state = jax.tree.map(_zeros, abstract.opt_state)
            abstract = dataclasses.replace(abstract, opt_state=())
        shardings = jax.tree.map(lambda x: x.sharding, abstract)
        around = jax.jit(self._around, out_shardings=shardings, donate_argnums=0, static_argnums=1)
        state = around(parameters, not self._offloads)
        return dataclasses.replace(state, opt_state=opt_state) if self._offloads else state

    def base(self) -> Parameters:
        """Loads or draws the parameters before the first step, without adapters."""
        model = self._config.model
        names = self._shapes.keys() - self._adapters
        if model.init_from is None:
            return self._drawn(names)
        wanted = self._wanted(names)
        return load_parameters(model.init_from, self.spec, wanted, override=model.override)

    def _wanted(self, names: Collection[str]) -> dict[str, Any]:
        """Shapes and shardings of parameters."""
        return {name: x for name, x in self.abstract().model.items() if name in names}

    def _drawn(self, names: Collection[str] | None = None) -> Parameters:
        def draw() -> Parameters:
            how = {"seed": self._config.run.seed, "mesh": self.mesh, "fsdp": self.fsdp}
            drawn = self.flatten(init_model(self.spec, **how)[1])
            return drawn if names is None else {name: drawn[name] for name in sorted(names)}

        if names is not None and not names:
            return {}
        return draw() if names is None else jax.jit(draw)()

    def _around(self, parameters: Parameters, moments: bool = True) -> TrainState:
        zero = jnp.zeros((), jnp.int32)
        saved, base = _split(parameters, self._adapters or parameters)
        return TrainState(
            step=zero,
            parameters=saved,
            opt_state=self.optimizer.init(self.split(parameters)[0]) if moments else (),
            skipped=zero,
            skipped_in_row=zero,
            rng=jax.random.key_data(jax.random.key(self._config.run.seed, impl=PRNG_IMPL)),
            base=base,
        )


def _on_host(sharding: NamedSharding) -> NamedSharding:
    """The same in pinned memory of the host."""
    found = sharding.with_memory_kind(PINNED_HOST)
    if found.memory_kind is None:  # devices to compile for, which are not there
        found = NamedSharding(sharding.mesh.abstract_mesh, sharding.spec, memory_kind=PINNED_HOST)
    return found


def _cast(x: Any, like: Any) -> Any:
    return x if x.dtype == like.dtype else x.astype(like.dtype)


def _zeros(x: jax.ShapeDtypeStruct) -> Array:
    assert x.sharding is not None
    shard = np.zeros(x.sharding.shard_shape(x.shape), x.dtype)
    return jax.make_array_from_callback(x.shape, x.sharding, lambda _: shard)


def _split(parameters: Parameters, names: Container[str]) -> tuple[Parameters, Parameters]:
    return (
        {name: x for name, x in parameters.items() if name in names},
        {name: x for name, x in parameters.items() if name not in names},
    )
