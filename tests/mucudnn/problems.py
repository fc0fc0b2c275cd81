"""Any small convolution problem, drawn by hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from mucudnn.convolution.problem import ConvProblem, Direction


@st.composite
def problems(
    draw: st.DrawFn, dtypes: tuple[str, ...] = ("float64",), max_extent: int = 5, ordinary: bool = False
) -> ConvProblem:
    """Any small convolution: 1 to 3 dims, strides, dilations, paddings, groups, transposed, three directions.

    Args:
        ordinary: not transposed, without strides and dilations, less padding than the kernel.
    """
    dims = draw(st.integers(1, 3))

    def per_dim(least: int, most: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(least, most)) for _ in range(dims))

    groups = draw(st.sampled_from([1, 1, 2, 3]))
    kernel, stride, dilation, padding = per_dim(1, 4), per_dim(1, 3), per_dim(1, 3), per_dim(0, 4)
    if ordinary:
        stride = dilation = (1,) * dims
        padding = tuple(draw(st.integers(0, k - 1)) for k in kernel)
    transposed = not ordinary and draw(st.booleans())
    channels = (groups * draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    spatial = per_dim(1, 9 if dims < 3 else 5)
    output_padding = None
    if transposed:
        output_padding = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
        weight_shape = (channels[0], channels[1], *kernel)
    else:
        weight_shape = (channels[1] * groups, channels[0] // groups, *kernel)
        reaches = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
        spatial = tuple(max(n, r - 2 * p) for n, r, p in zip(spatial, reaches, padding, strict=True))
    input_shape = (draw(st.integers(1, max_extent)), channels[0], *spatial)
    try:
        return ConvProblem.of_convolution(
            draw(st.sampled_from(list(Direction))),
            input_shape,
            weight_shape,
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
            transposed=transposed,
            output_padding=output_padding,
            dtype=draw(st.sampled_from(dtypes)),
        )
    except ValueError:  # a transposed convolution whose padding eats its whole output
        return draw(st.nothing())
