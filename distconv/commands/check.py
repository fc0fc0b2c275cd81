"""python -m distconv check: predicts in one process what a job would refuse and send, and its memory."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from distconv import settings
from distconv.commands.check_parts import check_in_turn, check_model_fits, check_script_fits, check_script_in_turn
from distconv.commands.network import model_builder, model_inputs, named_script, names_script
from distconv.commands.parts import settle_parts
from distconv.job.launcher import BadInput
from distconv.model.strategy import Strategy, read_strategy
from distconv.private_names import FOLLOWED, require
from distconv.settings.channels import check_algorithm
from distconv.settings.partition import AXES, Partition
from mucudnn import program
from mucudnn.commands.arguments import INPUT, add_batch, parse_shape
from mucudnn.commands.output import add_wide, print_json, show

if TYPE_CHECKING:
    from distconv.check.findings import Findings

BRIEF = "predict in one process what a job would refuse and send, and its memory"
DESCRIPTION = f"""\
Follows one step of a model, or of a script, as the first rank of a job, in one process. Shows every operator that would
be refused, the bytes that each layer sends, and the memory of a rank beside that of one process.

A model is followed by shapes alone: nothing is computed, and no memory is taken, however large it is. A script runs up
to the end of its first optimizer step; it computes its rank's part, and its side effects happen.

A partition names mesh axes and the ranks along each, for example height=4,width=2 on 8 ranks. Axes: {", ".join(AXES)}.
"""

EPILOG = """\
examples:
  python -m distconv check torchvision.models:resnet18 --input 8,3,224,224 --partition height=2,width=2
  python -m distconv check nets.py:UNet --input 1,1,256,256,256 --partition depth=8 --inference
  python -m distconv check nets.py:UNet --input 2,1,64,64,64 --partition sample=2,depth=2 --json
  python -m distconv check --partition height=4 train.py --lr 0.1
  python -m distconv check nets.py:UNet --input 2,1,64,64,64 --memory 200MiB
  python -m distconv check --memory 24GiB train.py
  python -m distconv check nets.py:Decoder --input 1,4,256,256 --parts height=8 --memory 4GiB --inference
  python -m distconv check --parts height=8 --memory 4GiB decode.py
  python -m distconv check nets.py:UNet --input 2,1,64,64,64 --partition depth=2 --parts depth=4

what it shows:
  refused   the operator, the layer, shapes and layouts, the line of the program, and what is accepted. After a refusal
            check continues with a result of the right shape, so that all refusals are shown. "fails" means an internal
            error of distconv: please report it
  sends     bytes that a rank sends in forward and backward, by layer; allreduces count as rings do
  memory    the most bytes of tensors at once on the rank, weights and gradients included, without the optimizer's state
            and without the scratch memory of kernels

exit codes: 0 if everything runs, 1 if something is refused or fails, 2 if the arguments do not allow a check.
"""

MOST_LAYERS = 20


def add_options(check: Any) -> None:
    """Adds the options of the command."""
    for name in ("partition", "channel_algorithm"):
        option = settings.SETTINGS[name]
        check.add_argument(settings.flag(name), dest=name, metavar=option.metavar, help=option.meaning)
    check.add_argument(
        "--parts",
        metavar="AXIS=PARTS,... | auto",
        help="follow a model that computes these parts in turn in one process, or with --partition in the first rank; "
        "of a script, each call of a model before it is computed; auto: as --memory alone",
    )
    check.add_argument(
        "--memory",
        metavar="BYTES | auto",
        help="show the ways to fit this limit; with --parts, the limit of the parts' tensors",
    )
    check.add_argument("--halo", metavar=settings.SETTINGS["halo"].metavar, help="with --parts: as of distconv run")
    check.add_argument("--shard-parameters", action="store_const", const="on", help="as of distconv run")
    check.add_argument("--strategy", metavar="FILE", help="a TOML file, as of distconv run")
    check.add_argument(
        "--input", action="append", type=parse_shape, metavar="C,H,W", help=f"{INPUT}; once for each input"
    )
    add_batch(check)
    check.add_argument("--inference", action="store_true", help="follow the forward alone, as in inference")
    check.add_argument(
        "--dtype",
        choices=["float32", "float64", "bfloat16", "float16"],
        default="float32",
        help="the dtype of the model",
    )
    check.add_argument(
        "--all-layers", action="store_true", help=f"show all layers, not the {MOST_LAYERS} that send most"
    )
    check.add_argument("--json", action="store_true", help="print JSON, for programs")
    add_wide(check)
    check.add_argument("-m", dest="module", action="store_true", help="TARGET names a module to run, as with python -m")
    check.add_argument(
        "target",
        metavar="TARGET",
        help="with --input a model: package.module:Model or file.py:Model, a torch.nn.Module or a callable that makes "
        "one without arguments; else a script",
    )
    arguments = check.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="the script's own arguments"
    )
    arguments.required = False  # a message about what is missing does not name it
    check.set_defaults(reread=check.parse_args)


def command(options: argparse.Namespace) -> int:
    """Show the findings; 1 where something is refused or fails, else 0."""
    require(FOLLOWED)
    if options.arguments and not names_script(options):  # options behind a model are this command's
        options = options.reread([*options.arguments, options.target], options)
        options.arguments = []
    settle_parts(options)
    if options.shard_parameters and (options.parts is not None or options.memory is not None):
        raise BadInput(
            f"check {'--memory' if options.parts is None else '--parts'} with --shard-parameters, which takes ranks to"
            " shard them; accepted: distconv run"
        )
    if options.parts is not None:
        with settings.options({"halo": options.halo}):
            return check_script_in_turn(options) if options.input is None else check_in_turn(options)
    if options.memory is not None:
        return check_script_fits(options) if options.input is None else check_model_fits(options)
    if options.halo is not None:
        raise BadInput("--halo, without --parts: chains begin with a model's second call; accepted: with --parts")
    given = {name: getattr(options, name) for name in ("partition", "channel_algorithm", "shard_parameters")}
    with settings.options(given):
        partition, strategy = _partitions(options)
        findings = _follow(options, partition, strategy)
    if options.json:
        print_json(findings.as_json())
    else:
        from distconv.check.findings import parts

        show(sys.stdout, *parts(findings, None if options.all_layers else MOST_LAYERS), wide=options.wide)
    return 0 if findings.accepted else 1


def _partitions(options: argparse.Namespace) -> tuple[Partition, Strategy | None]:
    try:
        partition = settings.value("partition")
        if partition == settings.AUTO:
            raise ValueError("--partition auto: accepted: axis=ranks,...; python -m distconv plan chooses a strategy")
        strategy = None
        if options.strategy is not None:
            strategy = read_strategy(options.strategy, partition.ranks if partition else None)
            partition = partition or strategy.outer
        if partition is None:
            raise ValueError(settings.NO_PARTITION)
        check_algorithm(settings.value("channel_algorithm"), partition)
        return partition, strategy
    except ValueError as error:
        raise BadInput(str(error)) from None


def _follow(options: argparse.Namespace, partition: Partition, strategy: Strategy | None) -> Findings:
    import torch

    from distconv.check import survey
    from distconv.job.ending import refusal_of

    try:
        if options.input is None:
            return survey.follow_script(named_script(options), partition, strategy=strategy, mistake_of=refusal_of)
        build = model_builder(options)
        return survey.model(
            build,
            model_inputs(build, options),
            partition,
            strategy=strategy,
            dtype=getattr(torch, options.dtype),
            backward=not options.inference,
            mistake_of=refusal_of,
        )
    except (program.NotFound, survey.FailsAlone, ValueError) as error:
        raise BadInput(" ".join(str(error).split())) from None
