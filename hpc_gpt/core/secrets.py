"""Find secrets (tokens, keys, passwords) in settings, logs and environments, and remove them.

Programs print their arguments and their environment, and people pass tokens in both. A key is judged by the words in
it, because most names with `token` or `key` are harmless (`eos_token`, `json_keys`). A value is judged by the formats
that hosts give their tokens. A doubtful value is removed: a missing setting does no harm, a published token does.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

REMOVED = "[removed]"

_ALWAYS = frozenset(
    (
        "password", "passwd", "passphrase", "secret", "secrets", "credential", "credentials", "apikey",
        "authorization", "signature", "sig",
    )
)  # fmt: skip
# Endings of names without a boundary between their words, such as PGPASSWORD and dbpasswd.
_ALWAYS_ENDS = ("password", "passwd", "passphrase")
# Words before `token` that make it a symbol of a vocabulary or a count.
_SYMBOLS = frozenset(
    (
        "eos", "bos", "pad", "unk", "sep", "cls", "mask", "eod", "eot", "bod", "sot", "fim", "image", "audio",
        "video", "vision", "special", "prefix", "suffix", "middle", "start", "end", "stop", "begin", "first", "last",
        "next", "per", "each", "draft", "speculative", "prompt", "decoder", "added", "new", "extra", "padding",
    )
)  # fmt: skip
# Words before `key` that make it a secret.
_KEYS = frozenset(
    (
        "api", "access", "private", "secret", "wandb", "auth", "ssh", "encryption", "account", "comet", "openai",
        "anthropic", "aws", "azure", "gcp", "storage", "license", "signing", "session", "neptune", "hf", "hub",
        "huggingface", "service", "gpg", "rsa", "shared", "subscription", "master", "kaggle",
    )
)  # fmt: skip
_WORDS = re.compile(r"[A-Z]{2,}(?![a-z])|[A-Z]?[a-z]+|\d+")
_VALUE = re.compile(
    r"\b(?:hf_|api_org_)[A-Za-z0-9]{16,200}"
    r"|\b(?:sk|pk|rk)-[A-Za-z0-9_-]{20,300}"
    r"|\bgh[pousr]_[A-Za-z0-9]{20,300}|\bgithub_pat_[A-Za-z0-9_]{20,300}|\bglpat-[A-Za-z0-9_-]{16,100}"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"
    r"|\bAIza[A-Za-z0-9_-]{30,60}"
    r"|\bxox[abprs]-[A-Za-z0-9-]{10,200}"
    r"|\bwandb_v\d_[A-Za-z0-9_]{20,300}"
    r"|\beyJ[A-Za-z0-9_-]{10,2000}\.[A-Za-z0-9_-]{10,2000}(?:\.[A-Za-z0-9_-]{0,2000})?"
    r"|-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----"
    r"|\b[Bb]earer [A-Za-z0-9._~+/=-]{16,2000}"
    r"|(?<=hooks\.slack\.com/services/)[\w/]{8,200}"
    r"|(?<=://)[^\s/:@]{0,200}:[^\s/@]{1,500}(?=@)"
    r"|(?<=http://)[^\s/:@]{3,200}(?=@)|(?<=https://)[^\s/:@]{3,200}(?=@)"
)


class _Command(NamedTuple):
    """The places of a secret on a program's command line.

    `begin`: the first words after which one is looked for. `options`: those with a secret as their value; `-p*` has it
    within its own word only. `sign`: a sign that the value contains. `place`: which of the words that are no options is
    the secret, or `NAME` for the one after a word that names a secret.
    """

    begin: str = ""
    options: str = ""
    sign: str = ""
    place: str = ""


_COMMANDS = {
    "wandb vault": _Command("login", place="1"),
    "curl": _Command(options="-u --user -U --proxy-user", sign=":"),
    "docker podman nerdctl buildah skopeo apptainer singularity helm oras az": _Command("login", "-p"),
    "sshpass mongo mongosh mongodump": _Command(options="-p"),
    "mysql mysqldump mysqladmin mysqlimport mariadb mariadb-dump": _Command(options="-p*"),
    "redis-cli http https": _Command(options="-a"),
    "zip unzip 7z": _Command(options="-P -p*"),
    "ldapsearch": _Command(options="-w"),
    "smbclient": _Command(options="-U", sign="%"),
    "lftp": _Command(options="-u", sign=","),
    "openssl": _Command(options="-pass -passin -passout", sign="pass:"),
    "mc": _Command("set add", place="4"),
    "aws git npm pip poetry conda kaggle": _Command("set config", place="NAME"),
}
_OF_PROGRAM = {name: command for names, command in _COMMANDS.items() for name in names.split()}
_PROGRAM = re.compile(rf"(?<![\w.-])(?:{'|'.join(map(re.escape, _OF_PROGRAM))})(?![\w.-])")
# A word of a line of bash, with its quotes, or a sign that ends a command.
_SHELL_WORD = re.compile(r"""(?:[^\s;|&()'"\\]|\\.|'[^']*'|"(?:[^"\\]|\\.)*"|['"])+|[\s\S]""")
_QUOTED_LINE = re.compile(r"""(['"])([^'"]*\s.*)\1""", re.DOTALL)  # bash -c 'a line'
_AROUND = "'\"`[],"
_ENDS_COMMAND = tuple(";|&()\n")
_NOT_SAID = ("$", "`", "<", "{")  # begins a variable or a placeholder
# The key before a value in a line of text: `WANDB_API_KEY=`, `"token": `, `--hub_token ` and, in a list of words,
# `'--hub_token', '`. The value after it is in the same quotes if it is quoted. is_secret judges the key.
_ASSIGNED = re.compile(
    r"(?<=-)([A-Za-z][\w.-]{1,80})(?:\s{1,4}\\?['\"]?|\\?['\"],\s{0,4}\\?['\"])(?!-)"
    r"|([A-Za-z][\w.-]{1,80})\\?['\"]?\s{0,4}[=:]\s{0,4}\\?['\"]?"
)
_ASSIGNED_VALUE = re.compile(r"[^\s'\",;)\]}\[]{3,2000}")
_QUOTED_VALUES = {"'": re.compile(r"[^'\n]{3,2000}(?=')"), '"': re.compile(r'(?:[^"\\\n]|\\[^"]){3,2000}(?=\\?")')}
_SCHEME = re.compile(r"(?i)(?:basic|bearer|token|digest|apikey)\s{1,4}")  # in an Authorization header
_OPTION = re.compile(r"--?([A-Za-z][\w.-]*)")
# The comma between two variables in the value of --export.
_EXPORTED = re.compile(r",(?=[A-Za-z_]\w*(?:=|,|$))")
# Last words of names that tell the place of a secret: `password_file`, `api-key-env`.
_PLACES = frozenset(("file", "filename", "path", "dir", "folder", "env"))
# `with password hunter2`, in prose. A word without a digit is kept, as in `password incorrect`.
_SAID = re.compile(
    r"(?i)(?<![-\w])(password|passphrase|passwd)(\s{1,4})['\"]?(?=[^\s\d]{0,200}\d)[^\s'\",;)\]}\[]{4,200}"
)
# Names of files that hold credentials, and folders of such files.
_CREDENTIAL_NAMES = re.compile(
    r"\.env|\.env\.[^/]+|[^/]+\.env|\.envrc|[._]netrc|\.pgpass|\.my\.cnf|\.pypirc|\.npmrc|\.git-credentials|\.htpasswd"
    r"|\.boto|\.s3cfg|\.dockercfg|\.?rclone\.conf|kaggle\.json|application_default_credentials\.json"
    r"|id_(?:rsa|dsa|ecdsa|ed25519)(?:_sk)?|[^/]+\.(?:pem|key|p8|p12|pfx|ppk|jks|keystore|kdbx)"
)
_CREDENTIAL_FOLDERS = frozenset((".ssh", ".aws", ".azure", ".gnupg", ".kube", ".docker", ".oci", ".huggingface"))
# Names of templates that show how to write such a file.
_TEMPLATES = re.compile(r".*\.(?:example|sample|template|tmpl|dist|defaults?)(?:\.\w+)?|.*[._-]example")
# A file named after a secret (`hf_token`, `api_key.txt`, `secrets.yaml`) holds one if it is text and not a program.
_TEXT_SUFFIXES = frozenset(("", ".txt", ".json", ".toml", ".yaml", ".yml", ".ini", ".cfg", ".conf"))
_PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----")
_NOTHING = frozenset(("none", "null", "true", "false"))
# Values of variables that are not secrets, whatever the name: a path, a number or a flag.
_HARMLESS = re.compile(
    r"(?i)(\.{0,2}/|~|\.{1,2}$).*|[+-]?\d[\d.]*(e[+-]?\d+)?|true|false|yes|no|on|off|none|null|", re.DOTALL
)
# Fewest characters of a hidden value; a shorter one is a switch or a number and occurs within other words.
_SHORTEST = 6


def is_secret(key: str, value: Any = None) -> bool:
    """Whether a setting may be a secret, by its name, or by its value whatever the name.

    >>> [is_secret(key) for key in ("wandb_api_key", "hub_token", "eos_token", "json_keys", "tokens_per_s")]
    [True, True, False, False, False]
    """
    if isinstance(value, str) and _has_shape(value):
        return True
    return _names_secret(key.rpartition(".")[2][:200], isinstance(value, bool | int | float))


def is_secret_variable(name: str, value: str) -> bool:
    """Whether an environment variable's value may be a secret: by its shape, or by the name unless it is a path, a
    number or a flag.

    >>> [is_secret_variable("HF_TOKEN", value) for value in ("opensesame", "~/.hf", "0", "hf_0123456789abcdefg")]
    [True, False, False, True]
    """
    return is_secret(name, value) and (_has_shape(value) or not _HARMLESS.fullmatch(value))


def is_credential_file(name: str, start: bytes = b"", is_closed: bool = False) -> bool:
    """Whether a file looks like a credential, by the rule in docs/your-own-program.md: its name or folder says so; it
    begins with a private key; or only its owner can read it (`is_closed`) and its `start` has a private key or a
    token.

    >>> [is_credential_file(name) for name in (".env", ".aws/config", "hf_token", "keys/id_rsa", "server.pem")]
    [True, True, True, True, True]
    >>> [is_credential_file(name) for name in (".env.example", "tokenizer.json", "secrets.py", "id_rsa.pub", "key.txt")]
    [False, False, False, False, False]
    """
    *folders, last = name.lower().split("/")
    if _PRIVATE_KEY.match(start.lstrip()) or _CREDENTIAL_FOLDERS & {*folders} or "/.config/gcloud/" in f"/{name}":
        return True
    stem, dot, suffix = last.rpartition(".") if "." in last[1:] else (last, "", "")
    is_text = f"{dot}{suffix}" in _TEXT_SUFFIXES
    is_named = _CREDENTIAL_NAMES.fullmatch(last) or (is_text and _names_secret(stem, False))
    if is_named and _TEMPLATES.fullmatch(last) is None:
        return True
    match = is_closed and (_PRIVATE_KEY.search(start) or (is_text and _VALUE.search(start.decode(errors="replace"))))
    return bool(match)


@lru_cache(maxsize=8192)
def _has_shape(value: str) -> bool:
    return bool(_VALUE.search(value))


@lru_cache(maxsize=8192)
def _names_secret(key: str, is_number: bool) -> bool:
    parts = [word.lower() for word in _WORDS.findall(key)]
    if parts and parts[-1] in _PLACES:
        return False
    if _ALWAYS & set(parts) or any(word.endswith(_ALWAYS_ENDS) for word in parts):
        return True
    # A number or a switch is a size or a choice, as `per_token 0` or `use_auth_token False`.
    if is_number:
        return False
    before = parts[-2] if len(parts) > 1 else ""
    if parts and parts[-1] == "token":
        return before not in _SYMBOLS
    # MYSQL_PWD, DB_PASS; PWD and OLDPWD are folders.
    if parts and parts[-1] in ("pwd", "pass"):
        return before not in ("", "old", "forward", "backward", "first", "second")
    return bool(parts) and parts[-1] == "key" and before in _KEYS


def without_secrets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, also nested ones, without possible secrets. In a list or a text a secret becomes `[removed]`."""
    return {
        key: _cleaned(value)
        for key, value in settings.items()
        if isinstance(value, Mapping | list | tuple) or not is_secret(str(key), value)
    }


def _cleaned(value: Any) -> Any:
    if isinstance(value, Mapping):
        return without_secrets(value)
    if isinstance(value, list | tuple):
        return [REMOVED if isinstance(part, str) and _VALUE.search(part) else _cleaned(part) for part in value]
    if isinstance(value, str):
        return hide_secrets(value)
    return value


@lru_cache(maxsize=8192)
def hide_secrets(text: str) -> str:
    """A line of text, such as a cause from a log, with possible secrets replaced by `[removed]`.

    >>> hide_secrets("WANDB_API_KEY=0123abcd train.py --hub_token xyzxyz --lr 1e-4: token mismatch")
    'WANDB_API_KEY=[removed] train.py --hub_token [removed] --lr 1e-4: token mismatch'
    """
    text = _hide_spelled(_SAID.sub(rf"\1\2{REMOVED}", _VALUE.sub(REMOVED, text)))
    shown, end = [], 0
    for match in _ASSIGNED.finditer(text):
        quoted = _QUOTED_VALUES.get(match[0][-1])
        scheme = _SCHEME.match(text, match.end()) if (match[2] or "").lower().endswith("authorization") else None
        start = scheme.end() if scheme else match.end()
        value = (quoted and quoted.match(text, start)) or _ASSIGNED_VALUE.match(text, start)
        if value is None or match.start() < end or value[0].lower() in (*_NOTHING, REMOVED):
            continue
        if is_secret(match[1] or match[2], 0 if value[0].isdigit() else None):
            shown += [text[end : match.end()], REMOVED]
            end = value.end()
    return "".join([*shown, text[end:]])


def _hide_spelled(text: str) -> str:
    """A text without the secrets that `_COMMANDS` spell."""
    if not _PROGRAM.search(text):
        return text
    words = [match[0] for match in _SHELL_WORD.finditer(text)]
    spelled = _spelled(words)
    inner = [_QUOTED_LINE.sub(lambda match: match[1] + _hide_spelled(match[2]) + match[1], word) for word in words]
    return "".join(spelled.get(index, word) for index, word in enumerate(inner))


def _spelled(words: Sequence[str]) -> dict[int, str]:
    """{index: the word without its secret} for each secret that `_COMMANDS` spell."""
    found = dict[int, str]()
    command = _Command()
    begun, takes, count, before = False, False, 0, ""
    for index, word in enumerate(words):
        if word.isspace() and word != "\n":
            continue
        bare = word.strip(_AROUND)
        option = next((each for each in command.options.split() if bare.startswith(each.rstrip("*"))), "")
        start, is_value, joined = word.find(bare), False, len(option.rstrip("*"))
        if (program := bare.rpartition("/")[2]) in _OF_PROGRAM and not takes:
            command = _OF_PROGRAM[program]
            begun, count = not command.begin, 0
        elif word in _ENDS_COMMAND:
            command, takes = _Command(), False
        elif takes or not begun or not (option or command.place) or (bare.startswith("-") and not option):
            is_value, begun, takes = takes, begun or bare in command.begin.split(), False
        elif option and len(bare) == joined:
            takes = not option.endswith("*")
        elif option:
            start, is_value = start + joined + (bare[joined] == "="), joined == 2 or bare[joined] == "="
        else:
            count += 1
            if command.place == "NAME":
                is_value = count > 1 and any(_names_secret(part, False) for part in before.split("."))
            else:
                is_value = count >= int(command.place) and "/" not in bare
        before, end = bare, len(word.rstrip(_AROUND))
        said = word[start:end].strip(_AROUND)
        said = said.partition(command.sign)[2] if command.sign else said
        is_value = is_value and len(said.strip("/")) > (0 if command.sign else 2)
        if is_value and said != REMOVED and not said.startswith(_NOT_SAID):
            found[index] = word[:start] + REMOVED + word[end:]
        if word.endswith("`"):
            command = _Command()
    return found


def hide_words(words: Iterable[str]) -> list[str]:
    """The words of a command line without possible secrets. A value is judged by the name before its `=`, or by the
    option before it.

    >>> hide_words(["train.py", "--api-key", "abcdef", "--json-keys", "text", "--eos-token", "</s>"])
    ['train.py', '--api-key', '[removed]', '--json-keys', 'text', '--eos-token', '</s>']
    >>> hide_words(["--export=ALL,WANDB_API_KEY=ab;c,LR=1", "PASSWORD=a b"])
    ['--export=ALL,WANDB_API_KEY=[removed],LR=1', 'PASSWORD=[removed]']
    """
    hidden, option, words = list[str](), "", list(words)
    spelled = _spelled(words)
    for index, word in enumerate(words):
        if index in spelled:
            shown = spelled[index]
        elif option == "export" or word.startswith("--export="):
            start = "" if option == "export" else "--export="
            shown = start + ",".join(map(_hide_value, _EXPORTED.split(word.removeprefix(start))))
        elif option and not word.startswith("-") and _is_value_of(option, word):
            shown = REMOVED
        else:
            shown = _hide_value(word)
        hidden.append(shown)
        match = _OPTION.fullmatch(word)
        option = match[1] if match else ""
    return hidden


def _hide_value(word: str) -> str:
    """A word `NAME=value` without its value if that may be a secret; other words as `hide_secrets` gives them."""
    name, equals, value = word.partition("=")
    is_name = equals and re.fullmatch(r"-{0,2}[A-Za-z_][\w.-]*", name)
    return f"{name}={REMOVED}" if is_name and _is_value_of(name.lstrip("-"), value) else hide_secrets(word)


def _is_value_of(name: str, value: str) -> bool:
    """Whether a value may be the secret that its name announces. Up to two characters may be the rest of a variable."""
    is_some = len(value) > 2 and value.lower() not in _NOTHING
    return is_some and _names_secret(name.rpartition(".")[2][:200], value.isdigit())


def hide_values(text: str, environment: Mapping[str, str]) -> str:
    """The text without the values of an environment's secrets, whatever their format.

    >>> hide_values("logged in with opensesame", {"WANDB_API_KEY": "opensesame", "HOME": "/root"})
    'logged in with [removed]'
    """
    values = {line for key, value in environment.items() if is_secret(key, value) for line in value.splitlines()}
    for value in sorted(values, key=len, reverse=True):
        if len(value) >= _SHORTEST:
            text = text.replace(value, REMOVED)
    return text
