"""Options that several commands have, each said once: real objects, which Typer need not compile from text at every start."""

from typing import Annotated, Optional

import typer

from kvctl.completing import complete_cache_formats, complete_output_formats, complete_sources

KDtype = Annotated[
    str,
    typer.Option(
        "--k-dtype",
        "--cache-type-k",
        "-ctk",
        metavar="NAME",
        help="Format of keys and latents alone.",
        autocompletion=complete_cache_formats,
    ),
]
VDtype = Annotated[
    str,
    typer.Option(
        "--v-dtype",
        "--cache-type-v",
        "-ctv",
        metavar="NAME",
        help="Format of values alone.",
        autocompletion=complete_cache_formats,
    ),
]
Set = Annotated[
    Optional[list[str]],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="What if: replace a field of the configuration (dotted for nested ones). Repeatable.",
        show_default=False,
    ),
]
Source = Annotated[
    Optional[str],
    typer.Option(
        "--source",
        metavar="NAME",
        help="Where to look: catalogue, cache (the Hub's, on this machine) or hub. Default: a path, then the cache, the catalogue, the Hub.",
        show_default=False,
        autocompletion=complete_sources,
    ),
]
Revision = Annotated[
    Optional[str],
    typer.Option("--revision", metavar="REV", help="Branch, tag or commit on the Hub.", show_default=False),
]
Format = Annotated[
    str,
    typer.Option(
        "--format", "-f", metavar="FORMAT", help="table, json, csv or md.", autocompletion=complete_output_formats
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Short for --format json.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, notes and warnings on stderr.")]
TextFile = Annotated[
    Optional[str],
    typer.Option(
        "--text", metavar="FILE", help="The text. Default: English prose that kvctl brings.", show_default=False
    ),
]
