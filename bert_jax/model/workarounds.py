"""Standard operations in a form that avoids a defect or a slow path of XLA or JAX, each with its reason.

Where no upstream issue is named, none is known; the plain form is then named. To check whether a workaround can go, put
the plain form in its place and compare the named symptom.

A form for the slow paths of XLA:CPU stays if the plain form makes a training step take 5% more of the CPU's time. The
figures are of `bert:L4_H256` with 8 rows of 128 tokens on two cores, by jaxlib 0.10.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec


def weight_einsum(equation: str, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Computes `jnp.einsum(equation, x, kernel)` in the type of x [B, L, ...], with B and L merged to one axis.

    `equation` names the merged axis first and ends the axes of x with those that start the axes of the kernel. With B
    and L on two axes, XLA:CPU transposes the operands of the kernel's gradient and multiplies at half speed: compare
    the time of a training step on a CPU. `checkpoint_name` calls the result "weight_product".
    """
    tokens = x.reshape(-1, *x.shape[2:])
    product = jnp.einsum(equation, tokens, kernel.astype(x.dtype), preferred_element_type=x.dtype)
    return checkpoint_name(product, "weight_product").reshape(*x.shape[:2], *product.shape[1:])


def is_argmax(logits: jax.Array, labels: jax.Array, label_logits: jax.Array) -> jax.Array:
    """Computes `jnp.argmax(logits, axis=-1) == labels`, where `label_logits` are the logits of the labels.

    XLA:CPU does not vectorize the two-operand reduction of argmax, with which a step takes 6% longer. Both maxima here
    are taken in one pass over the logits.
    """
    comes_before = jnp.arange(logits.shape[-1]) < labels[..., None]
    largest_before = logits.max(axis=-1, where=comes_before, initial=-jnp.inf)
    return (label_logits == logits.max(axis=-1)) & ((label_logits > largest_before) | (labels == 0))


@jax.custom_vjp
def add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """Computes x [..., *S] + bias [*S] in the type of x; the bias's gradient is summed in the type of the bias.

    XLA:CPU adds up the gradient of a bias of tens of thousands of elements at 2 GB/s; the product of a vector of ones
    with it takes a thirtieth of the time. Without it a step takes 6% longer.
    """
    return x + bias.astype(x.dtype)


def _add_bias_forward(x: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
    return add_bias(x, bias), bias


def _add_bias_backward(bias: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    def plain(gradient: jax.Array) -> jax.Array:
        return gradient.astype(bias.dtype).sum(axis=range(gradient.ndim - bias.ndim))

    def on_cpu(gradient: jax.Array) -> jax.Array:
        rows = gradient.reshape(-1, *bias.shape)
        ones = jnp.ones(len(rows), rows.dtype)
        total = jnp.tensordot(ones, rows, axes=1, precision="highest", preferred_element_type=jnp.float32)
        return total.astype(bias.dtype)

    return gradient, jax.lax.platform_dependent(gradient, default=plain, cpu=on_cpu)


add_bias.defvjp(_add_bias_forward, _add_bias_backward)


@jax.custom_jvp
def erf(x: jax.Array) -> jax.Array:
    """Returns `jax.lax.erf(x)`, whose derivative works inside of `jax.shard_map` and costs one exponential.

    The derivative in jax 0.12.0 is a `polynomial` primitive of x and of constant coefficients. `lax.polynomial` binds
    them without a cast to the varying manual axes of x, so the trace ends in "Primitive polynomial requires varying
    manual axes to match". `jnp.argmax` once had the same defect: https://github.com/jax-ml/jax/issues/28334. The
    derivative below is that of jax 0.10 and 0.11. It can go once `lax.polynomial` casts its coefficients, which jax
    0.12.0 and 0.12.0.1 do not.
    """
    return jax.lax.erf(x)


@erf.defjvp
def _erf_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (x,), (tangent,) = primals, tangents
    return erf(x), 2.0 / math.sqrt(math.pi) * (tangent * jnp.exp(-jnp.square(x)))


recurrent_initializer = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
"""Initializes an LSTM's recurrent kernel up to 1 / sqrt(units), as torch does.

`jax.nn.initializers.orthogonal` is the usual one. Two QR decompositions at once may wait for each other forever in
jaxlib 0.10 on CPU hosts with few cores: build a `BertForTask` with a BiLSTM under `taskset -c 0,1`.
"""


def kernel_on_mesh(forward: Callable[..., tuple[jax.Array, Any]], backward: Callable[..., jax.Array]) -> Any:
    """Returns a differentiable function of (x, *inputs) from the calls of a Pallas or cuDNN kernel.

    `forward` maps (x, *inputs) to the result and what `backward` needs, which a layer saves as "fused_attention".
    `backward` maps (x, *inputs), that, and the gradient of the result to the gradient of x.
    """

    @jax.custom_vjp
    def call(x: jax.Array, *inputs: jax.Array) -> jax.Array:
        return run(x, *inputs)[0]

    def run(x: jax.Array, *inputs: jax.Array) -> tuple[jax.Array, Any]:
        result, saved = _on_every_axis(forward)(x, *inputs)
        return vary_like(x, result), (x, *inputs, checkpoint_name(saved, "fused_attention"))

    def differentiate(saved: Any, gradient: jax.Array) -> tuple[jax.Array | None, ...]:
        by_x = vary_like(gradient, _on_every_axis(backward)(*saved, gradient))
        return by_x, *(None for _ in saved[2:])

    call.defvjp(run, differentiate)
    return call


def kernel_of_jax_on_mesh(attend: Callable[..., jax.Array]) -> Any:
    """Applies `kernel_on_mesh` to a kernel that JAX differentiates, such as its splash attention.

    Returns a differentiable function of (qkv [B, L, 3, N, H], *inputs) to the context [B, L, N, H]. `attend` maps q, k
    and v, each [B, L, N, H], and the inputs to the context [B, N, L, H].
    """

    def forward(qkv: jax.Array, *inputs: jax.Array) -> tuple[jax.Array, Any]:
        # Slices and swaps here: values computed without the VMA check vary along no axis, as the gradient must, too.
        context, backward = jax.vjp(lambda *parts: attend(*parts, *inputs), *(qkv[:, :, i] for i in range(3)))
        return jnp.swapaxes(context, 1, 2), backward

    def backward(*arguments: Any) -> jax.Array:
        *_, saved, gradient = arguments
        return jnp.stack(saved(jnp.swapaxes(gradient, 1, 2)), axis=2)

    return kernel_on_mesh(forward, backward)


def _on_every_axis(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` of full arrays in a `jax.shard_map` over the mesh axes that are not yet manual.

    A Pallas or cuDNN call in the `jax.shard_map` of a training step needs all mesh axes to be manual and needs VMA
    annotations on its outputs; it provides neither. So the kernel and its gradients run in a nested `shard_map` with
    `check_vma=False`, whose results `vary_like` casts. Its axes shard nothing: the kernel reads a device's full arrays.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return function
    return jax.shard_map(
        function, axis_names=set(mesh.auto_axes), in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )


def vary_like(other: jax.Array, tree: Any) -> Any:
    """Casts leaves to vary along the manual mesh axes of `other`; values do not change.

    `manual_axis_type` is not documented; it replaced `jax.typeof(x).vma` and has no public equivalent in jax 0.10.2. It
    can go with `_on_every_axis`.
    """

    def cast(x: jax.Array) -> jax.Array:
        axes = jax.typeof(other).manual_axis_type.varying - jax.typeof(x).manual_axis_type.varying
        return jax.lax.pcast(x, tuple(axes), to="varying")

    return jax.tree.map(cast, tree)
