"""The libraries that attention is compared with, each set up as its users would.

Shapes by letter: B batch, H query heads, Hkv key and value heads, Tq queries, Tk keys, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Causal = Literal["none", "top_left", "bottom_right"]


class Unsupported(Exception):
    """A peer cannot do a case. The message becomes the table's footnote."""


def aligned(array: Array) -> Array:
    """A contiguous copy on a 64-byte boundary, where NumPy's own may lie across cache lines."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    offset = -memory.ctypes.data % 64
    copy: Array = memory[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@dataclass(frozen=True)
class Problem:
    """One attention problem; the fields are those of attend_bench --json."""

    dtype: str
    B: int
    H: int
    Hkv: int
    Tq: int
    Tk: int
    D: int
    causal: bool

    def inputs(self, copies: int) -> Inputs:
        generator = np.random.default_rng(1)

        def normal(heads: int, tokens: int) -> Array:
            shape = (self.B, heads, tokens, self.D)
            return generator.standard_normal(shape, dtype=np.float32).astype(self.dtype)

        key, value = normal(self.Hkv, self.Tk), normal(self.Hkv, self.Tk)
        return Inputs(
            query=aligned(normal(self.H, self.Tq)),
            keys=[aligned(key) for _ in range(copies)],
            values=[aligned(value) for _ in range(copies)],
        )

    def folded(self) -> Problem:
        """Grouped heads as ordinary ones: the query heads that share a key head become queries of
        it. The same answers, as long as every query sees every key."""
        if self.H == self.Hkv:
            return self
        if self.causal:
            raise Unsupported("no grouped heads with a causal mask")
        return Problem(
            self.dtype,
            self.B,
            self.Hkv,
            self.Hkv,
            self.H // self.Hkv * self.Tq,
            self.Tk,
            self.D,
            False,
        )


@dataclass(frozen=True)
class Inputs:
    """query (B, H, Tq, D), and copies of keys and values (B, Hkv, Tk, D) to be used in turn."""

    query: Array
    keys: list[Array]
    values: list[Array]


@dataclass(frozen=True)
class Call:
    """A problem set up in a library."""

    run: Callable[[int], object]  # on a copy of keys and values
    output: Callable[[], Array]  # of the last run: (B, H, Tq, D)
    causal: Causal  # which keys a query saw


class Peer(Protocol):
    name: str
    version: str

    def prepare(self, problem: Problem, inputs: Inputs) -> Call:
        """Raises Unsupported."""
        ...


def reference(problem: Problem, inputs: Inputs, causal: Causal) -> Array:
    """The definition, in float64."""
    group = problem.H // problem.Hkv
    query = inputs.query.astype(np.float64)
    key = np.repeat(inputs.keys[0].astype(np.float64), group, axis=1)
    value = np.repeat(inputs.values[0].astype(np.float64), group, axis=1)
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(problem.D)
    if causal != "none":
        offset = problem.Tk - problem.Tq if causal == "bottom_right" else 0
        visible = np.tri(problem.Tq, problem.Tk, offset, dtype=bool)
        scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    output: Array = weights / weights.sum(axis=-1, keepdims=True) @ value
    return output


def heads_last(array: Array) -> Array:
    """(B, H, T, D) to (B, T, H * D), which ONNX Runtime's own operators take."""
    b, h, t, d = array.shape
    return aligned(array.transpose(0, 2, 1, 3)).reshape(b, t, h * d)


def heads_first(array: Array, problem: Problem) -> Array:
    shape = (problem.B, problem.Tq, problem.H, problem.D)
    result: Array = array.reshape(shape).transpose(0, 2, 1, 3)
    return result


class OnnxRuntime:
    """One attention operator of ONNX Runtime, alone in a model, on memory bound beforehand."""

    def __init__(self, operator: str, threads: int) -> None:
        import onnx
        import onnxruntime

        self._onnx = onnx
        self._ort = onnxruntime
        self._operator = operator
        self._threads = threads
        self.name = f"ONNX Runtime {operator}"
        self.version: str = onnxruntime.__version__

    def prepare(self, problem: Problem, inputs: Inputs) -> Call:
        if problem.dtype != "float32":
            # Attention takes float64, but answers with errors of 1e-7.
            raise Unsupported("float32 only")
        if self._operator == "Attention":
            return self._attention(problem, inputs)
        if self._operator == "MultiHeadAttention":
            return self._multi_head(problem, inputs)
        return self._grouped_query(problem, inputs)

    def _attention(self, problem: Problem, inputs: Inputs) -> Call:
        """ai.onnx, opset 23."""
        query, output = self._value(inputs.query), self._like(inputs.query)
        feeds = [
            {"Q": query, "K": self._value(key), "V": self._value(value)}
            for key, value in zip(inputs.keys, inputs.values, strict=True)
        ]
        run = self._prepare({"is_causal": int(problem.causal)}, feeds, [{"Y": output}] * len(feeds))
        return Call(run, output.numpy, "top_left" if problem.causal else "none")

    def _multi_head(self, problem: Problem, inputs: Inputs) -> Call:
        """com.microsoft. Its own layout is heads last; few queries over long keys take those as a
        cache holds them, heads first, or each call would copy them."""
        folded = problem.folded()
        packed = heads_last(inputs.query.reshape(folded.B, folded.H, folded.Tq, folded.D))
        query, output = self._value(packed), self._like(packed)
        decode = problem.Tq < problem.Tk
        feeds = [
            {
                "query": query,
                "key": self._value(key if decode else heads_last(key)),
                "value": self._value(value if decode else heads_last(value)),
            }
            for key, value in zip(inputs.keys, inputs.values, strict=True)
        ]
        attributes = {"num_heads": folded.H, "unidirectional": int(problem.causal)}
        run = self._prepare(attributes, feeds, [{"output": output}] * len(feeds))
        return Call(
            run,
            lambda: heads_first(output.numpy(), folded).reshape(inputs.query.shape),
            "top_left" if problem.causal else "none",
        )

    def _grouped_query(self, problem: Problem, inputs: Inputs) -> Call:
        """com.microsoft. Always causal. Few queries are the newest tokens of a cache that is
        updated in place; many are a prompt."""
        decode = problem.Tq < problem.Tk
        if not (problem.causal or decode):
            raise Unsupported("causal only")
        if decode and problem.B > 1 and problem.Tq > 1:
            raise Unsupported("one sequence only, where several queries meet a cache")
        packed = heads_last(inputs.query)
        query, output = self._value(packed), self._like(packed)
        lengths = self._value(np.full(problem.B, problem.Tk - 1, np.int32))
        total = self._value(np.array(problem.Tk, np.int32))
        feeds, results = [], []
        for key, value in zip(inputs.keys, inputs.values, strict=True):
            cache = {"key": self._value(key), "value": self._value(value)}
            feeds.append(
                {
                    "query": query,
                    "key": self._value(heads_last(key[:, :, -problem.Tq :])),
                    "value": self._value(heads_last(value[:, :, -problem.Tq :])),
                    "past_key": cache["key"] if decode else None,
                    "past_value": cache["value"] if decode else None,
                    "seqlens_k": lengths,
                    "total_sequence_length": total,
                }
            )
            results.append(
                {"output": output, "present_key": cache["key"], "present_value": cache["value"]}
            )
        attributes = {"num_heads": problem.H, "kv_num_heads": problem.Hkv}
        run = self._prepare(attributes, feeds, results)
        causal: Causal = "bottom_right" if decode else "top_left"
        return Call(run, lambda: heads_first(output.numpy(), problem), causal)

    def _value(self, array: Array) -> Any:
        return self._ort.OrtValue.ortvalue_from_numpy(array)

    def _like(self, array: Array) -> Any:
        return self._value(aligned(np.zeros_like(array)))

    def _prepare(
        self, attributes: dict[str, int], feeds: list[dict[str, Any]], results: list[dict[str, Any]]
    ) -> Callable[[int], object]:
        """A session of the operator, and how to run it on the memory of one copy. An input that is
        None is left out."""
        session = self._session(attributes, feeds[0], results[0])
        bindings = []
        for inputs, outputs in zip(feeds, results, strict=True):
            binding = session.io_binding()
            for name, value in inputs.items():
                if value is not None:
                    binding.bind_ortvalue_input(name, value)
            for name, value in outputs.items():
                binding.bind_ortvalue_output(name, value)
            bindings.append(binding)

        def run(copy: int, memory: object = (feeds, results)) -> None:
            # ONNX Runtime does not keep NumPy's memory alive; `memory` does.
            session.run_with_iobinding(bindings[copy])

        return run

    def _session(
        self, attributes: dict[str, int], inputs: dict[str, Any], outputs: dict[str, Any]
    ) -> Any:
        helper = self._onnx.helper

        def described(values: dict[str, Any]) -> list[Any]:
            return [
                helper.make_tensor_value_info(name, value.element_type(), value.shape())
                for name, value in values.items()
                if value is not None
            ]

        node = helper.make_node(
            self._operator,
            ["" if value is None else name for name, value in inputs.items()],
            list(outputs),
            domain="" if self._operator == "Attention" else "com.microsoft",
            **attributes,
        )
        graph = helper.make_graph([node], "attention", described(inputs), described(outputs))
        opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
        options = self._ort.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.log_severity_level = 3  # errors only
        return self._ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )


class OpenVino:
    """ScaledDotProductAttention of opset 13."""

    name = "OpenVINO"

    def __init__(self, threads: int) -> None:
        import openvino

        self._openvino = openvino
        self._core = openvino.Core()
        self._settings = {
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": "f32",
            "PERFORMANCE_HINT": "LATENCY",
        }
        self.version: str = openvino.__version__.split("-")[0]

    def prepare(self, problem: Problem, inputs: Inputs) -> Call:
        if problem.dtype != "float32":
            raise Unsupported("float32 only")
        folded = problem.folded()
        query = inputs.query.reshape(folded.B, folded.H, folded.Tq, folded.D)
        operators = self._openvino.opset13
        parameters = [
            operators.parameter(array.shape, np.float32)
            for array in (query, inputs.keys[0], inputs.values[0])
        ]
        attention = operators.scaled_dot_product_attention(*parameters, causal=problem.causal)
        model = self._openvino.Model([attention], parameters)
        request = self._core.compile_model(model, "CPU", self._settings).create_infer_request()

        def tensor(array: Array) -> Any:
            return self._openvino.Tensor(array, shared_memory=True)

        request.set_input_tensor(0, tensor(query))
        copies = [
            (tensor(key), tensor(value))
            for key, value in zip(inputs.keys, inputs.values, strict=True)
        ]

        def run(copy: int) -> None:
            request.set_input_tensor(1, copies[copy][0])
            request.set_input_tensor(2, copies[copy][1])
            request.infer()

        return Call(
            run,
            lambda: request.get_output_tensor(0).data.reshape(inputs.query.shape),
            "top_left" if problem.causal else "none",
        )


class Torch:
    """torch.nn.functional.scaled_dot_product_attention."""

    name = "PyTorch"

    def __init__(self, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self._torch = torch
        self.version: str = torch.__version__.split("+")[0]

    def prepare(self, problem: Problem, inputs: Inputs) -> Call:
        torch = self._torch
        query = torch.from_numpy(inputs.query)
        copies = [
            (torch.from_numpy(key), torch.from_numpy(value))
            for key, value in zip(inputs.keys, inputs.values, strict=True)
        ]
        outputs: list[Any] = [None]

        def run(copy: int) -> None:
            with torch.inference_mode():
                outputs[0] = torch.nn.functional.scaled_dot_product_attention(
                    query,
                    *copies[copy],
                    is_causal=problem.causal,
                    enable_gqa=problem.H != problem.Hkv,
                )

        return Call(run, lambda: outputs[0].numpy(), "top_left" if problem.causal else "none")
