"""What may be a secret is left out, and what only sounds like one stays."""

import json
import shlex

import pytest

from hpc_gpt.core.secrets import hide_secrets, hide_values, hide_words, is_secret, without_secrets
from hpc_gpt.core.settings.program_text import command_faults


@pytest.mark.parametrize(
    "key",
    [
        "password", "DB_PASSWORD", "hf_token", "HF_TOKEN", "hubToken", "push_to_hub_token", "wandb_api_key",
        "api-key", "AWS_SECRET_ACCESS_KEY", "authToken", "WANDBKey", "train.hub_token", "credentials", "passphrase",
        "PGPASSWORD", "dbpasswd", "MYSQL_PWD", "X-Amz-Signature", "token",
    ],
)  # fmt: skip
def test_a_key_that_names_a_secret_is_one(key):
    assert is_secret(key, "abc")


@pytest.mark.parametrize(
    "key",
    [
        "tokens", "tokenizer_model", "eos_token", "pad_token_id", "train_tokens", "tokens_per_s",
        "moe_token_dispatcher_type", "json_keys", "kv_channels", "monkey", "text_key", "loss_per_token",
        "wandb_project", "password_file", "api-key-env", "json-keys", "PWD", "OLDPWD", "lr",
    ],
)  # fmt: skip
def test_a_key_that_only_sounds_like_one_is_not(key):
    assert not is_secret(key, "abc")


@pytest.mark.parametrize(
    "value",
    [
        "hf_" + "a1" * 17,
        "sk-" + "b2" * 20,
        "ghp_" + "c3" * 18,
        "AKIA" + "ABCDEFGH12345678",
        "https://user:pass@host/path",
        "Bearer " + "d4" * 12,
        "eyJ" + "a" * 20 + "." + "b" * 20 + "." + "c" * 20,
        "-----BEGIN OPENSSH PRIVATE KEY-----",
    ],
)
def test_a_value_of_a_secrets_shape_is_one_whatever_its_key(value):
    assert is_secret("note", value)
    assert value not in str(without_secrets({"note": value, "notes": [value], "deep": {"note": value}}))
    assert value not in hide_secrets(f"it said {value} and died")


def test_nested_settings_keep_the_rest():
    given = {
        "train": {"lr": 1e-4, "hub_token": "x"},
        "eos_token": "</s>",
        "wandb_key": "y",
        "on": [1, {"password": 12}],
    }
    assert without_secrets(given) == {"train": {"lr": 1e-4}, "eos_token": "</s>", "on": [1, {}]}


def test_a_secret_inside_a_settings_text_is_cut_out_of_it():
    given = {
        "tracker": "https://h/x?api_key=abcd&lr=1",
        "extra_args": "--password abcd --lr 3",
        "config": "{'password': 'abcd', 'lr': 1}",
    }
    cleaned = without_secrets(given)
    assert cleaned.keys() == given.keys()
    assert "abcd" not in str(cleaned)
    assert "lr" in cleaned["config"]


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("foo --token abcdef x", "foo --token [removed] x"),
        ("x: token=abcd 'hf_token': 'zzzz'", "x: token=[removed] 'hf_token': '[removed]'"),
        ("PASSWORD=12345", "PASSWORD=[removed]"),
        ("token: 5 of 7", "token: 5 of 7"),
        ("unexpected token in JSON", "unexpected token in JSON"),
        ("hub_token: None", "hub_token: None"),
        ("login with password hunter2 failed", "login with password [removed] failed"),
        ("password incorrect in step 2", "password incorrect in step 2"),
        ("{'PGPASSWORD': 'abcd', 'lr': 1}", "{'PGPASSWORD': '[removed]', 'lr': 1}"),
        ("['x', '--api-key', 'abcd', '--json-keys', 'text']", "['x', '--api-key', '[removed]', '--json-keys', 'text']"),
        ("--password 'ab cd' --lr 3", "--password '[removed]' --lr 3"),
        ('{\\"api_key\\": \\"abcd\\"}', '{\\"api_key\\": \\"[removed]\\"}'),
        ("Args(hf_token='ab, cd', lr=1)", "Args(hf_token='[removed]', lr=1)"),
        ("Authorization: Basic abcdef==", "Authorization: [removed]"),
        ("--use-auth-token --lr 3", "--use-auth-token --lr 3"),
        ("--token-file a/b --password-file /c", "--token-file a/b --password-file /c"),
        ("https://h/x?lr=1&sig=abcd", "https://h/x?lr=1&sig=[removed]"),
        ("to https://hooks.slack.com/services/T0/B0/abcd now", "to https://hooks.slack.com/services/[removed] now"),
    ],
)
def test_a_line_of_a_log_is_kept_but_for_the_secret(text, hidden):
    assert hide_secrets(text) == hidden


SECRET = "plantedZz7"
SPELLED = (
    "wandb login X9", "srun bash -c 'x && python -m wandb login X9'", "vault login X9", "git clone https://X9@host/a",
    "pip install --index-url https://X9@host/simple x", "curl -u me:X9 x", "curl -ume:X9 x", "curl --user=me:X9 x",
    "curl -H 'PRIVATE-TOKEN: X9' x", "docker login -u me -p X9", "podman login -pX9", "sshpass -p X9 ssh h",
    "apptainer registry login -u me -p 'X9' docker://h", "mysql -u me -pX9 db", "mysqldump -p'X9' db",
    "redis-cli -a X9",
    "aws configure set aws_secret_access_key X9", "aws configure set default.aws_secret_access_key X9 --profile x",
    "git config --global github.token X9", "npm config set //h/:_authToken X9", "poetry config pypi-token.pypi X9",
    "mc alias set h https://h me X9", "az login --service-principal -u x -p X9", "unzip -P X9 a.zip", "7z x -pX9 a.7z",
    "smbclient //h/s -U me%X9", "ldapsearch -w X9", "openssl enc -pass pass:X9", "KAGGLE_KEY=X9", "DB_PASS=X9 x",
    "huggingface-cli login --token X9", "gpg --passphrase X9", "wget --http-password=X9 h", "psql postgresql://me:X9@h/d",
)  # fmt: skip
TAKEN = (
    'wandb login "$KEY"', 'wandb login "$(cat key)"', "wandb login --relogin", "docker login --password-stdin",
    "docker run -p 8080:80 x", "https://host/a/b", "git clone git@host:a/b", "git clone ssh://git@host/a",
    "mysql -u me -p db", "curl -u $ME:$KEY x", "curl -u me x", "curl -s http://localhost:8000/x", "redis-cli -h x",
    "aws configure set region eu-west-1", "git config user.name me", "python train.py -p 4", "scp me@host:/x .",
    "wandb login <key>", "set -u; sshpass -e ssh h",
)  # fmt: skip


@pytest.mark.parametrize("line", SPELLED)
def test_a_commands_secret_is_refused_and_hidden(line: str) -> None:
    """A secret that the command says by its place, in a line, as words, in a file of TOML and in a printed list."""
    planted = line.replace("X9", SECRET)
    texts = (planted, f"+ {planted}", f"run = {json.dumps(planted)}", f"setup = [{json.dumps(planted)}]")
    for text in (*texts, *([] if "'" in line else [str(planted.split())])):
        assert SECRET not in hide_secrets(text), text
    words = hide_words(shlex.split(planted))
    assert SECRET not in " ".join(words)
    assert len(words) == len(shlex.split(planted))
    for command in (planted, shlex.split(planted)):
        faults = list(command_faults("command.run", command))
        assert faults
        assert SECRET not in str(faults)


@pytest.mark.parametrize("line", TAKEN)
def test_a_command_without_its_secret_is_taken(line: str) -> None:
    assert [*command_faults("command.run", line), *command_faults("command.run", shlex.split(line))] == []
    assert hide_secrets(line) == line


@pytest.mark.parametrize(
    ("words", "hidden"),
    [
        (["--api-key", "abcd", "x"], ["--api-key", "[removed]", "x"]),
        (["--json-keys", "text", "--eos-token", "X"], ["--json-keys", "text", "--eos-token", "X"]),
        (["--use-auth-token", "--lr", "3"], ["--use-auth-token", "--lr", "3"]),
        (["--token", "5"], ["--token", "5"]),
        (["--api-key=ab]c d;e"], ["--api-key=[removed]"]),
        (["--export", "A=1,HF_TOKEN=a]b,B=2"], ["--export", "A=1,HF_TOKEN=[removed],B=2"]),
        (["--export=ALL,PASSWORD='a,b',C"], ["--export=ALL,PASSWORD=[removed],C"]),
        (["bash", "-c", "x --token abcd"], ["bash", "-c", "x --token [removed]"]),
        (["api-key", "abcd"], ["api-key", "abcd"]),
    ],
)
def test_a_word_is_judged_by_the_one_before_it(words, hidden):
    assert hide_words(words) == hidden


def test_a_secret_by_its_value_alone_is_cut_out_line_by_line():
    environment = {
        "DEPLOY": "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXk\n-----END OPENSSH PRIVATE KEY-----",
        "UPSTREAM": "http://me:opensesame@proxy:3128",
        "PASSWORD": "short",
        "HOME": "/home/someone",
    }
    said = hide_values("b3BlbnNzaC1rZXk via http://me:opensesame@proxy:3128 short /home/someone", environment)
    assert said == "[removed] via [removed] short /home/someone"
