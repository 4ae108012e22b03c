"""Draw docs/figures/batch.svg, the picture of the page "How a batch travels".

The picture follows the color scheme of the reader: dark colors are in a media query of its style sheet.

    python tools/draw_batch.py
"""

from __future__ import annotations

from html import escape
from pathlib import Path

FILE = Path(__file__).parents[1] / "docs" / "figures" / "batch.svg"
WIDTH, HEIGHT = 244, 106  # of a station
LEFT, TOP, RIGHT_STEP, DOWN_STEP = 20, 62, 292, 168
STATIONS = (  # title, file, what it adds, the hidden state; three in a row
    ("Environment step", "envs/rollout.py", "[B]  next: observation, reward, done", "zero in rows that were reset"),
    ("Policy step", "modules/recurrent.py", "[B]  action, action_log_prob", "read; written under next"),
    ("Collector batch", "collectors/batch.py", "[B, T]  trajectory ids, step numbers", "stored before every step"),
    ("Advantages", "objectives/value/advantages.py", "[B, T]  advantage, value_target", "one step past each end"),
    ("Minibatches", "data/minibatches.py", "[M]  sequences, is_init at starts", "read at the starts only"),
    ("Recurrent pass", "recurrence/stack.py", "[M, H]  features", "starts from the stored one"),
    ("Loss", "objectives/ppo.py", "scalars: objective, critic, entropy", "not needed"),
    ("Gradient step", "trainers/optim/gradient_step.py", "clipped gradients, Adam", "not needed"),
    ("Weight update", "collectors/weights.py", "the policy that acts is replaced", "carried over, now stale"),
)
COLUMNS = (0, 1, 2, 2, 1, 0, 0, 1, 2)  # the rows are read back and forth
STYLE = """
  .card { fill: #ffffff; } .box { fill: #eef0fa; stroke: #3f51b5; } .line { stroke: #616161; fill: none; }
  .head { fill: #616161; } text { fill: #212121; font: 12px sans-serif; } .title { font: bold 15px sans-serif; }
  .file { font: 12px monospace; } .state { fill: #b71c1c; } .note { fill: #555555; }
  @media (prefers-color-scheme: dark) {
    .card { fill: #1e2129; } .box { fill: #2b3146; stroke: #8c9eff; } .line { stroke: #b0b4c0; }
    .head { fill: #b0b4c0; } text { fill: #eceff4; } .state { fill: #ff9e80; } .note { fill: #b8bdc9; }
  }
"""


def corner(number: int) -> tuple[int, int]:
    """Return the top left corner of a station."""
    return LEFT + COLUMNS[number] * RIGHT_STEP, TOP + number // 3 * DOWN_STEP


def station(number: int) -> list[str]:
    """Draw a station."""
    x, y = corner(number)
    title, file, adds, state = map(escape, STATIONS[number])
    return [
        f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="7" class="box"/>',
        f'<text x="{x + 12}" y="{y + 24}" class="title">{number + 1}  {title}</text>',
        f'<text x="{x + 12}" y="{y + 46}" class="file">{file}</text>',
        f'<text x="{x + 12}" y="{y + 69}">{adds}</text>',
        f'<text x="{x + 12}" y="{y + 91}" class="state">state: {state}</text>',
    ]


def arrow(*points: tuple[int, int]) -> str:
    """Draw an arrow through points."""
    path = " ".join(f"{'L' if index else 'M'}{x},{y}" for index, (x, y) in enumerate(points))
    return f'<path d="{path}" class="line" stroke-width="1.6" marker-end="url(#head)"/>'


def note(x: int, y: int, text: str, anchor: str = "middle") -> str:
    """Write a note next to an arrow."""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" class="note">{escape(text)}</text>'


def arrows() -> list[str]:
    """Draw the arrows from station to station."""
    gap, middle = RIGHT_STEP - WIDTH, HEIGHT // 2
    first, second, batch = corner(0), corner(1), corner(2)
    bottom = [(corner(number)[0] + WIDTH // 2, corner(number)[1]) for number in (2, 5)]
    right = corner(8)[0] + WIDTH
    above = second[0] + WIDTH // 2
    return [
        arrow((first[0] + WIDTH, first[1] + middle - 14), (second[0] - 2, first[1] + middle - 14)),
        arrow((second[0], first[1] + middle + 14), (first[0] + WIDTH + 2, first[1] + middle + 14)),
        note(first[0] + WIDTH + gap // 2, first[1] + middle - 22, "root"),
        note(first[0] + WIDTH + gap // 2, first[1] + middle + 32, "action"),
        arrow((second[0] + WIDTH, first[1] + middle), (batch[0] - 2, first[1] + middle)),
        note(second[0] + WIDTH + gap // 2, first[1] + middle - 8, "T steps"),
        *(arrow((x, y + HEIGHT), (x, y + DOWN_STEP - 2)) for x, y in bottom),
        note(bottom[0][0] + 10, bottom[0][1] + HEIGHT + 36, "whole batch", "start"),
        note(bottom[1][0] + 10, bottom[1][1] + HEIGHT + 36, "every minibatch", "start"),
        arrow((corner(3)[0], corner(3)[1] + middle), (corner(4)[0] + WIDTH + 2, corner(4)[1] + middle)),
        arrow((corner(4)[0], corner(4)[1] + middle), (corner(5)[0] + WIDTH + 2, corner(5)[1] + middle)),
        arrow((corner(6)[0] + WIDTH, corner(6)[1] + middle), (corner(7)[0] - 2, corner(7)[1] + middle)),
        arrow((corner(7)[0] + WIDTH, corner(7)[1] + middle), (corner(8)[0] - 2, corner(8)[1] + middle)),
        arrow(
            (right, corner(8)[1] + middle), (right + 22, corner(8)[1] + middle), (right + 22, 30), (above, 30),
            (above, TOP - 2),
        ),
        note(above + 12, 24, "new weights, from the next batch", "start"),
    ]  # fmt: skip


def drawn() -> str:
    """Return the picture."""
    width, height = corner(8)[0] + WIDTH + 42, corner(8)[1] + HEIGHT + 22
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            'aria-label="The stations of a batch: from the environment step to the weight update and back">',
            f"<style>{STYLE}</style>",
            '<defs><marker id="head" markerWidth="9" markerHeight="9" refX="7" refY="4" orient="auto">'
            '<path d="M0,0 L8,4 L0,8 z" class="head"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="10" class="card"/>',
            *(line for number in range(len(STATIONS)) for line in station(number)),
            *arrows(),
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    FILE.write_text(drawn())
