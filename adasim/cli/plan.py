"""`adasim plan`: what a recipe takes on this machine and these images, or the sizes of a run of any size."""

from __future__ import annotations

from collections.abc import Sequence

from adasim.cli.options import read_options
from adasim.cli.pretrain import check_paths, configured
from adasim.options import PlanArguments
from adasim.util import terminal
from adasim.util.errors import UserError


def main(arguments: Sequence[str]) -> None:
    """`adasim plan RECIPE --data DIR`, with the options of a pretraining; or `adasim plan --images N ...`"""
    if not arguments or arguments[0].startswith("-"):
        asked = read_options(PlanArguments, arguments, "plan")

        from adasim.tools.plan import make_plan, show

        plan, console = make_plan(asked), terminal.console(width=110)
        show(plan.lines(), console)
        return console.print(f"\n{plan.advice()}", soft_wrap=True)
    if arguments[0] == "photos":
        raise UserError(
            "`photos` makes its plan from your images and your machine: adasim pretrain photos --data DIR shows it, "
            "and asks before it starts."
        )
    config = configured(arguments[0], arguments[1:], "plan").config
    check_paths(config)

    from adasim.tools.plan import forecast

    forecast(config, terminal.console())
