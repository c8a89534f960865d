"""A few lines of SVG: panels with axes, dots, lines and text. The colours are those of the program's own plots."""

import math
from html import escape

BLUE, SKY, GREEN, RED, PINK, ORANGE = "#0072B2", "#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#E69F00"
TEXT, GRID, FAINT = "#282828", "#DEDEDE", "#8A8A8A"


class Scale:
    """From data to pixels: linear, or logarithmic with zero drawn in a place of its own below the least."""

    def __init__(self, low, high, start, end, log=False, zero=None):
        self.low, self.high, self.start, self.end, self.log, self.zero = low, high, start, end, log, zero

    def __call__(self, value):
        if self.log and value <= 0:
            value = self.zero
        low, high, value = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (self.end - self.start) * (value - low) / (high - low)


class Picture:
    def __init__(self, width, height, title, caption):
        self.width, self.height = width, height
        self.parts = [f'<rect width="{width}" height="{height}" fill="#FFFFFF"/>']
        self.label = title
        self.text(16, 26, title, size=16)
        for i, line in enumerate(caption):
            self.text(16, height - 12 - 15 * (len(caption) - 1 - i), line, size=11, colour=FAINT)

    def text(self, x, y, words, size=12, anchor="start", colour=TEXT, turn=None, bold=False):
        extra = f' transform="rotate({turn} {x:.1f} {y:.1f})"' if turn else ""
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-family="sans-serif" font-size="{size}" text-anchor="{anchor}" fill="{colour}"{weight}{extra}>'
            f"{escape(words)}</text>"
        )

    def line(self, points, colour=TEXT, width=1.5, dash=None):
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="{width}"{dashes} points="{path}"/>')

    def mark(self, x, y, shape="dot", colour=BLUE, size=4.0, opacity=0.65):
        style = f'stroke="{colour}" stroke-opacity="{opacity}" stroke-width="1.6"'
        if shape == "dot":
            self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size}" fill="{colour}" fill-opacity="{opacity}"/>')
        elif shape == "ring":
            self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size}" fill="none" {style}/>')
        elif shape == "cross":
            s = size * 0.8
            d = f"M{x - s:.1f},{y - s:.1f} L{x + s:.1f},{y + s:.1f} M{x - s:.1f},{y + s:.1f} L{x + s:.1f},{y - s:.1f}"
            self.parts.append(f'<path d="{d}" fill="none" {style}/>')
        elif shape == "diamond":
            s = size * 1.25
            d = f"M{x:.1f},{y - s:.1f} L{x + s:.1f},{y:.1f} L{x:.1f},{y + s:.1f} L{x - s:.1f},{y:.1f} Z"
            self.parts.append(f'<path d="{d}" fill="{colour}" fill-opacity="{opacity}"/>')
        else:
            raise ValueError(f"drawing a mark: found {shape!r}, expected dot, ring, cross or diamond")

    def panel(self, x, y, title, x_ticks, y_ticks, x_name, y_name=None):
        """Frame, grid, ticks (value, label) and names of axes whose scales are given."""
        left, right, top, bottom = x.start, x.end, y.end, y.start
        for value, label in y_ticks:
            self.line([(left, y(value)), (right, y(value))], GRID, 1)
            self.text(left - 7, y(value) + 4, label, 11, "end")
        for value, label in x_ticks:
            self.line([(x(value), bottom), (x(value), bottom + 4)], TEXT, 1)
            self.text(x(value), bottom + 18, label, 11, "middle")
        self.line([(left, top), (left, bottom), (right, bottom)], TEXT, 1)
        self.text((left + right) / 2, top - 9, title, 13, "middle", bold=True)
        self.text((left + right) / 2, bottom + 37, x_name, 12, "middle")
        if y_name:
            self.text(left - 44, (top + bottom) / 2, y_name, 12, "middle", turn=-90)

    def legend(self, x, y, entries):
        """Entries (shape, colour, words) in a row."""
        for shape, colour, words in entries:
            if shape in ("line", "dashed"):
                self.line([(x - 8, y - 4), (x + 8, y - 4)], colour, 2, "5 3" if shape == "dashed" else None)
            else:
                self.mark(x, y - 4, shape, colour, opacity=0.9)
            self.text(x + 13, y, words, 12)
            x += 38 + 6.6 * len(words)

    def svg(self):
        head = (
            f'<svg role="img" aria-label="{escape(self.label)}" width="{self.width}" height="{self.height}" '
            f'viewBox="0 0 {self.width} {self.height}" xmlns="http://www.w3.org/2000/svg">'
        )
        return "\n".join([head, *self.parts, "</svg>\n"])
