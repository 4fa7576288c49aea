"""`rollq publish`: a directory of safetensors files becomes the pool's weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from producer.commands.common import PATIENCE, SETTINGS, file_error, json_option, target
from producer.contract.errors import RollqError
from producer.contract.states import UpdatePolicy


@click.command(context_settings=SETTINGS)
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@target
@click.option(
    "--weights-dir",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    envvar="ROLLQ_WEIGHTS_DIR",
    show_envvar=True,
    help="Shared with the workers; DIRECTORY is copied there unless it lies in it.",
)
@click.option("--step", default=0, help="A label, kept with the version.")
@click.option(
    "--policy",
    type=click.Choice([str(p) for p in UpdatePolicy]),
    default="requeue",
    help="Of samples in flight: hand them back, go on in place, or let them end first.",
)
@click.option("--deadline", default=60.0, help="Seconds, for --policy finish.")
@click.option("--force", is_flag=True, help="A new version also of the files that are current.")
@click.option(
    "--max-updating",
    metavar="N|SHARE",
    help="Workers that stop to load at once: a number, or a share such as 0.25.  [default: 0.5]",
)
@click.option("--wait", metavar="WORKERS|all", help="Until so many workers serve it.")
@click.option("--timeout", default=600.0, help="Seconds, for --wait.")
@json_option
def publish(
    directory: Path,
    url: str,
    queue: str,
    weights_dir: Path,
    step: int,
    policy: str,
    deadline: float,
    force: bool,
    max_updating: str | None,
    wait: str | None,
    timeout: float,
    as_json: bool,
) -> None:
    """Publish the safetensors files of DIRECTORY as the pool's next weights.

    \b
    rollq publish checkpoints/step-120 --queue grpo --weights-dir /shared/weights --step 120
    rollq publish checkpoints/step-110 --queue grpo --step 110 --wait 8     back to an older one

    Says the version that Redis gave them. The files that are current change nothing. With --wait
    exit code 1 where workers could not load them (each one's reason is said; if none could, the
    pool goes on with the last good version) or the time is over.
    """
    from producer.client import RolloutClient

    try:
        with RolloutClient(url, queue, weights_dir=weights_dir, patience=PATIENCE) as client:
            version = client.publish_weights(
                directory,
                step=step,
                policy=policy,
                deadline_s=deadline,
                max_updating=_number(max_updating, "--max-updating"),
                force=force,
                wait="all" if wait == "all" else _number(wait, "--wait"),
                timeout=timeout,
            )
        if as_json:
            click.echo(json.dumps({"version": version, "step": step, "served": bool(wait)}))
        else:
            click.echo(f"{directory} is version {version} of queue {queue}")
            if wait:
                click.echo(f"it is served by {'all' if wait == 'all' else wait} workers")
    except OSError as error:
        if isinstance(error, RollqError):
            raise
        raise file_error(error, "weights cannot be published") from None


def _number(text: str | None, option: str) -> Any:
    """`4` is a number, `0.5` or `1.0` a share."""
    if text is None:
        return None
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        raise click.UsageError(f"{option} {text}: not a number") from None
