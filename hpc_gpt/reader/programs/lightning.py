"""PyTorch Lightning's bar: the batch of the epoch, and the figures that the program puts after it.

The count restarts with each epoch, so it is a step number in the first epoch only; of later epochs the loss and the epoch
are read. The goal of the count is for one epoch, and old Lightning includes validation batches. With gradient
accumulation a batch is not a step. The rate is smoothed and includes validation and saves: no step time is taken from
it. A cut bar has no `]`: below a whole bar its figures with a comma after them are read. The bar of rich has bullets,
and a blank after each figure. The parameters are those of the first rank: with Megatron's strategies, its share.
"""

from hpc_gpt.reader.lines.pattern import CLOCK, LINE_START, NUMBER, Dialect, Pattern, figures, line

_LABEL = r"(?<!\d)(?:\d{1,3}%)?\|[^|\n]{0,400}\| *"
_LOSSES = """
    loss=loss|loss_step|train_loss|train_loss_step|train/loss|train/loss_step
    loss_eval=val_loss|val_loss_epoch|val/loss|val/loss_epoch
"""
_CLOSED = r"(?=[^\]\n]{0,3000}\])"
_NOT_NEMO = r"(?![^\]\n]{0,3000}reduced_train_loss)"
_EPOCH = r"\bEpoch (?:0|(?P<epoch>[1-9]\d{0,6}))[^|%\n]{0,20}"
_BATCH = _LABEL + r"(?(epoch)\d{1,12}|(?P<step>\d{1,12}))/"
_FIRST = rf"(?:\bEpoch 0[^|%\n]{{0,20}}|{LINE_START})" + _LABEL
_RICH = rf" [━╸╺ -]{{1,400}}(?<= )(?P<step>\d{{1,12}})/\d{{1,12}} (?P<elapsed_s>{CLOCK}) • (?:{CLOCK}|-:--:--) "

DIALECT = Dialect(
    name="lightning",
    engine="lightning",
    flags=("Lightning's bar counts batches of an epoch, which are steps only without gradient accumulation",),
    patterns=(
        # A loader of unknown length, with or without the version.
        figures(rf"{_EPOCH}{_BATCH}\? \[{CLOCK}<{_NOT_NEMO}{_CLOSED}", "/? [", _LOSSES, until="]"),
        *(
            figures(
                rf"(?:{_EPOCH}|{LINE_START}){_BATCH}\d{{1,12}} \[(?(epoch)|{CLOCK}<){_NOT_NEMO}{version}{_CLOSED}",
                literal,
                _LOSSES,
                until="]",
            )
            # A program may leave out the version; these names of losses are Lightning's, too.
            for literal, version in (
                ("v_num=", r"(?=[^\]\n]{0,3000}v_num=)"),
                ("loss_step=", r"(?![^\]\n]{0,3000}v_num=)"),
            )
        ),
        Pattern(
            "progress",
            _FIRST + rf"(?P<step>\d{{1,12}})/\d{{1,12}} \[(?P<elapsed_s>{CLOCK})<{_NOT_NEMO}[^\]\n]{{0,3000}}\]",
            literal="v_num=",
        ),
        # A bar that the terminal cut has no `]`; then only figures that a comma follows are complete.
        figures(
            rf"{_EPOCH}{_BATCH}\d{{1,12}} \[{CLOCK}<{_NOT_NEMO}(?![^\n]{{0,3000}}\])"
            rf"(?=[^\n]{{0,3000}}?[, ](?:train[_/])?loss(?:_step)?={NUMBER}(?:\.0)?,)",
            "%|",
            _LOSSES,
            own=True,
        ),
        Pattern(
            "progress",
            rf"\bEpoch 0[^|%\n]{{0,20}}{_LABEL}(?P<step>\d{{1,12}})/\d{{1,12}} \[(?P<elapsed_s>{CLOCK})<(?![^\n]{{0,3000}}\])",
            literal="%|",
            own=True,
        ),
        figures(
            r"\bEpoch 0(?:/\d{1,6})?" + _RICH.replace("(?P<elapsed_s>", "(?:") + r"(?=[\d.]{1,12}(?:it/s|s/it) )",
            " • ",
            _LOSSES,
        ),
        Pattern("progress", r"\bEpoch 0(?:/\d{1,6})?" + _RICH + r"(?=[\d.]{1,12}(?:it/s|s/it)(?: |$))"),
        Pattern(
            "fact",
            LINE_START + r"(?P<params_of_rank>\d{1,4}(?:\.\d{1,3})? {1,4}[KMB]?) {1,8}Total params(?=\s*$)",
            weak=True,
        ),
        Pattern(
            "fact", LINE_START + r"Total params: (?P<params_of_rank>\d{1,4}(?:\.\d{1,3})? [KMB])(?=\s*$)", weak=True
        ),
        Pattern("end", r"`Trainer\.fit` stopped: `max_(?:steps|epochs)=", ended="done"),
        line("end", "`Trainer.fit` stopped: `max_time=", ended="walltime"),
    ),
)
