"""A group of commands made by click, which ends in sys.exit() and knows its program's name."""

import math

import click
from values import say


@click.group()
@click.option("--seed", type=int, default=0)
@click.pass_context
def cli(context, seed):
    context.obj = seed


@cli.command()
@click.argument("folder", type=click.Path())
@click.option("--lr", type=float, required=True)
@click.option("--verbose/--quiet", default=True)
@click.pass_context
def train(context, folder, lr, verbose):
    if math.isnan(lr):
        raise click.UsageError("loss is nan")
    path = context.command_path
    say(program=path, folder=folder, seed=context.obj, lr=lr, verbose=verbose)


if __name__ == "__main__":
    cli()
