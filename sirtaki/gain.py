"""How a gain is told, in every log line, table and page alike."""


def faster(before_s: float, after_s: float) -> str:
    """`1.24× faster`, `1.10× slower`, or `as fast` where the difference is less than half a percent."""
    ratio = before_s / after_s
    if abs(ratio - 1.0) < 0.005:
        return "as fast"
    factor, word = (ratio, "faster") if ratio > 1.0 else (1.0 / ratio, "slower")
    return f"{factor:.2f}× {word}" if factor < 10.0 else f"{factor:.0f}× {word}"


def faster_than(before_s: float, after_s: float, *, other: str) -> str:
    """`1.24× faster than` the other, or `as fast as` it."""
    told = faster(before_s, after_s)
    return f"{told} {'as' if told == 'as fast' else 'than'} {other}"
