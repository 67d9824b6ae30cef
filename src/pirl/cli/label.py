"""`pirl label`: label recorded episodes as success or failure on a local page."""

import argparse
import getpass
import webbrowser

NAME = "label"
HELP = """\
Plays a LeRobot dataset's episodes in the browser. Keys label each one: success, failure or unsure, optionally with the
moment of success and a quality from 0 to 5. Labels go to meta/pirl_labels.jsonl at once; training finds them there.
Several people can label one dataset; `pirl inspect data` shows conflicts.

--classify labels episodes without an outcome with a success classifier on a checkpoint's features. It trains on the
episodes that have one, here and in --learn, and prints its accuracy on held-out episodes. It labels only episodes above
the required precision (--precision) and leaves the others to people. Human labels always take precedence.

The page is only reachable from this machine. --write opens no page: it stores the labels as the column next.success,
which LeRobot reads."""
EXAMPLES = """\
examples:
  pirl label recordings/fold_box
  pirl label recordings/fold_box --name ann --port 8000   on another machine: ssh -L 8000:localhost:8000 HOST
  pirl label recordings/fold_box --classify checkpoints/acrlpd_aloha_fold/box1 --learn demos/fold_box
  pirl label recordings/fold_box --write                  store next.success in the dataset"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `pirl label`."""
    parser.add_argument("data", metavar="DATASET", help="folder, or repo id on the Hugging Face hub")
    parser.add_argument("--name", metavar="NAME", help="annotator (default: your user name; the page can change it)")
    parser.add_argument("--port", type=int, default=0, metavar="N", help="port of the page (default: a free one)")
    parser.add_argument("--no-open", action="store_true", help="print the address and open no browser")
    parser.add_argument(
        "--classify", metavar="CHECKPOINT", help="label with a classifier on this checkpoint's features; no page"
    )
    parser.add_argument("--learn", nargs="+", default=[], metavar="DATASET", help="--classify: also train on these")
    parser.add_argument(
        "--precision", type=float, default=0.95, metavar="P", help="--classify: required precision of labels (0.95)"
    )
    parser.add_argument("--dry-run", action="store_true", help="--classify: print what it would label, write nothing")
    parser.add_argument("--write", action="store_true", help="store the labels as next.success and exit")


def run(args: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C, classify, or write the column."""
    from pirl.data import lerobot

    root = lerobot.resolve(args.data)
    if args.classify:
        return _classify(args)
    if args.write:
        from pirl.data.label_columns import write_success

        count = write_success(root)
        print(f"next.success of {count} episodes -> {root}")
        return 0
    _serve(args)
    print(f"labels are in {root / 'meta'}; see them with: pirl inspect data {args.data}")
    return 0


def _classify(args: argparse.Namespace) -> int:
    from pirl.errors import ConfigError
    from pirl.label.classify import classify

    if not 0.5 <= args.precision <= 1:
        raise ConfigError(f"--precision {args.precision}", hint="a share from 0.5 to 1, such as 0.95")
    print(classify(args.data, args.classify, learn=args.learn, precision=args.precision, write=not args.dry_run))
    return 0


def _serve(args: argparse.Namespace) -> None:
    from pirl.errors import ConfigError
    from pirl.label.server import LabelServer

    try:
        server = LabelServer(args.data, name=args.name or _user(), port=args.port)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--port {args.port}: {error}", hint="leave --port out to take a free one") from error
    with server:
        print(
            f"labelling {server.meta.root} at {server.url}\nCtrl-C ends; every label is stored when it is given",
            flush=True,
        )
        if not args.no_open:
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container without a user
        return ""
