"""Writes lesson_inputs.txt, the inputs of the lesson's attention head, beside this file.

Run it with any Python that has numpy; the generator's stream is fixed, so the file never changes.
"""

import pathlib

import numpy

HEADER = """\
# Inputs of the lesson's attention head, drawn by lesson_inputs.py.
# A matrix is a line "name rows columns" and then a line for each row, in C's hexadecimal floats
# (exact float64).
"""


def main():
    rng = numpy.random.default_rng(7)
    # The order of the draws is part of the definition.
    shapes = {"X": (5, 8), "W_q": (8, 4), "W_k": (8, 4), "W_v": (8, 4), "W_o": (4, 8)}
    lines = []
    for name, shape in shapes.items():
        matrix = rng.normal(size=shape) * 0.5
        lines.append(f"{name} {shape[0]} {shape[1]}")
        lines.extend(" ".join(value.hex() for value in row) for row in matrix.tolist())
    path = pathlib.Path(__file__).with_name("lesson_inputs.txt")
    path.write_text(HEADER + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
