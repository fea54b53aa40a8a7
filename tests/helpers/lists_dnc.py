"""A differentiable neural computer in plain Python numbers and lists, from the equations of Csordás 2023, appendix A.1.

It shares no code with `fairseq_sg.ops.memory` or `fairseq_sg.modules.memory`: it reads their parameters by name alone.
One layer of an LSTM, one sentence at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

EPS = 1e-6
Vector = list[float]
Matrix = list[Vector]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def oneplus(x: float) -> float:
    return 1 + math.log(1 + math.exp(x))


def softmax(x: Sequence[float]) -> Vector:
    powers = [math.exp(value - max(x)) for value in x]
    return [power / sum(powers) for power in powers]


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def linear(weight: Matrix, bias: Vector | None, x: Vector) -> Vector:
    return [dot(row, x) + (0 if bias is None else bias[i]) for i, row in enumerate(weight)]


class ListsDNC:
    """A model's numbers.

    Args:
        model: sizes and parameters. variant: M, D and S.
        mask_floor, clamp: δ and the limit of ξ.
    """

    def __init__(self, model, variant: tuple[bool, bool, bool], *, mask_floor: float, clamp: float):
        self.p = {name: parameter.tolist() for name, parameter in model.named_parameters()}
        self.n, self.w, self.r = cells, width, heads = model.cells, model.width, model.heads
        self.masks, self.deallocate, self.sharpen = variant
        self.floor, self.clamp = mask_floor, clamp
        dim = len(self.p["controller.inputs.bias"]) // 4
        self.h, self.c = [0.0] * dim, [0.0] * dim
        self.memory = [[0.0] * width for _ in range(cells)]
        self.usage, self.precedence = [0.0] * cells, [0.0] * cells
        self.links = [[0.0] * cells for _ in range(cells)]
        self.write_weights = [0.0] * cells
        self.read_weights = [[0.0] * cells for _ in range(heads)]
        self.reads = [[0.0] * width for _ in range(heads)]

    def interface(self) -> dict:
        """The named parts of ξ, in the order of the three parts of the weights."""
        w, r = self.w, self.r

        def numbers(part: str) -> Vector:
            weight, bias = self.p[f"interface.{part}.weight"], self.p[f"interface.{part}.bias"]
            xi = linear(weight, bias, self.h)
            return [min(max(x, -self.clamp), self.clamp) for x in xi] if self.clamp else xi

        plain = numbers("plain")

        def take(source: Vector, many: int) -> Vector:
            taken = source[:many]
            del source[:many]
            return taken

        found = {"k_w": take(plain, w), "k_r": [take(plain, w) for _ in range(r)], "v": take(plain, w)}
        found["e"] = [sigmoid(x) for x in take(plain, w)]
        found["f"] = [sigmoid(x) for x in take(plain, r)]
        found["g_a"], found["g_w"] = (sigmoid(x) for x in take(plain, 2))
        (found["b_w"],) = (oneplus(x) for x in take(plain, 1))
        found["b_r"] = [oneplus(x) for x in take(plain, r)]
        found["pi"] = [softmax(take(plain, 3)) for _ in range(r)]
        assert not plain
        found["m_w"], found["m_r"] = [1.0] * w, [[1.0] * w for _ in range(r)]
        if self.masks:
            m = [sigmoid(x) * (1 - self.floor) + self.floor for x in numbers("masks")]
            found["m_w"], found["m_r"] = take(m, w), [take(m, w) for _ in range(r)]
        if self.sharpen:
            s = [oneplus(x) for x in numbers("sharpness")]
            found["s_f"], found["s_b"] = s[:r], s[r:]
        return found

    def look_up(self, key: Vector, strength: float, mask: Vector) -> Vector:
        scores = []
        for cell in self.memory:
            a, b = ([x * m for x, m in zip(v, mask, strict=True)] for v in (key, cell))
            scores.append(strength * dot(a, b) / (math.sqrt(dot(a, a)) * math.sqrt(dot(b, b)) + EPS))
        return softmax(scores)

    def sharpened(self, d: Vector, s: float) -> Vector:
        powers = [((x + EPS) / (max(d) + EPS)) ** s for x in d]
        return [x / sum(powers) for x in powers]

    def step(self, x: Vector) -> Vector:
        cells = range(self.n)
        reads = [value for read in self.reads for value in read]
        gates = [
            a + b
            for a, b in zip(
                linear(self.p["controller.inputs.weight"], self.p["controller.inputs.bias"], x),
                linear(self.p["controller.recurrent.0.weight"], None, reads + self.h),
                strict=True,
            )
        ]
        s = len(self.h)
        for q in range(s):
            i, f, o = sigmoid(gates[q]), sigmoid(gates[s + q]), sigmoid(gates[2 * s + q])
            self.c[q] = f * self.c[q] + i * math.tanh(gates[3 * s + q])
            self.h[q] = o * math.tanh(self.c[q])
        xi = self.interface()
        # Usage and allocation.
        psi = [math.prod(1 - xi["f"][i] * self.read_weights[i][n] for i in range(self.r)) for n in cells]
        before = zip(self.usage, self.write_weights, psi, strict=True)
        self.usage = [(u + w - u * w) * kept for u, w, kept in before]
        u = [x * (1 - EPS) + EPS for x in self.usage]
        a, product = [0.0] * self.n, 1.0
        for n in sorted(cells, key=lambda n: (u[n], n)):
            a[n] = (1 - u[n]) * product
            product *= u[n]
        # Write.
        c = self.look_up(xi["k_w"], xi["b_w"], xi["m_w"])
        w = [xi["g_w"] * (xi["g_a"] * a[n] + (1 - xi["g_a"]) * c[n]) for n in cells]
        for n in cells:
            kept = psi[n] if self.deallocate else 1.0
            self.memory[n] = [
                x * kept * (1 - w[n] * e) + w[n] * v for x, e, v in zip(self.memory[n], xi["e"], xi["v"], strict=True)
            ]
        self.links = [
            [0.0 if i == j else (1 - w[i] - w[j]) * self.links[i][j] + w[i] * self.precedence[j] for j in cells]
            for i in cells
        ]
        self.precedence = [(1 - sum(w)) * self.precedence[n] + w[n] for n in cells]
        self.write_weights = w
        # Read.
        for i in range(self.r):
            before = self.read_weights[i]
            f = [sum(self.links[n][m] * before[m] for m in cells) for n in cells]
            b = [sum(self.links[m][n] * before[m] for m in cells) for n in cells]
            if self.sharpen:
                f, b = self.sharpened(f, xi["s_f"][i]), self.sharpened(b, xi["s_b"][i])
            c = self.look_up(xi["k_r"][i], xi["b_r"][i], xi["m_r"][i])
            back, content, ahead = xi["pi"][i]
            self.read_weights[i] = [back * b[n] + content * c[n] + ahead * f[n] for n in cells]
            self.reads[i] = [sum(self.read_weights[i][n] * self.memory[n][q] for n in cells) for q in range(self.w)]
        own = linear(self.p["output.weight"], self.p["output.bias"], self.h)
        reads = [value for read in self.reads for value in read]
        return [a + b for a, b in zip(
            own, linear(self.p["output_of_reads.weight"], self.p["output_of_reads.bias"], reads), strict=True
        )]  # fmt: skip
