"""The secret of a cluster on loopback: whose file it may be, and what is proven with it."""

import dataclasses
import os
import pwd
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cachefs.errors import ConfigError
from cachefs_cluster.membership import secret
from cachefs_cluster.membership.handshake import Greeting, Verdict, explain_verdict, judge_greeting
from cachefs_cluster.membership.secret import ClusterSecret, ProofScope, load_secret, make_nonce, proofs_match
from cachefs_cluster.membership.view import ClusterView
from cachefs_cluster.section import ClusterSection
from tests.members import member_id, member_record

NODES = ("a=127.0.0.1:7000", "b=127.0.0.1:7100")
KEY = ClusterSecret(b"0123456789abcdef")
PORT = member_record(1).data_port
VIEW = ClusterView(7, member_id(1), (member_record(1), member_record(2)), (), "etcd", "", 0.0)


def section(path: Path | None, **more: object) -> ClusterSection:
    return ClusterSection(membership="static", name="a", nodes=NODES, secret_file=path, **more)  # type: ignore[arg-type]


def test_daemons_that_start_together_make_one_secret(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    with ThreadPoolExecutor(8) as pool:
        found = {one.key for one in pool.map(lambda _: load_secret(section(path)), range(40)) if one is not None}
    assert len(found) == 1
    assert len(*found) >= 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["secret"]


def test_daemons_of_one_user_share_a_file_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret, "default_secret_file", lambda: tmp_path / "state" / "shared")
    assert load_secret(section(None)) == load_secret(section(None))
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("mode", "is_used"), [(0o755, True), (0o700, True), (0o1777, False), (0o775, False)])
def test_the_default_file_is_where_no_other_user_can_make_it_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, is_used: bool
) -> None:
    user = pwd.getpwuid(os.geteuid())
    assert user.pw_uid == os.geteuid()
    (home := tmp_path / "home").mkdir()
    home.chmod(mode)
    (shm := tmp_path / "shm").mkdir()
    monkeypatch.setattr(secret, "SHM", shm)
    made = pwd.struct_passwd((*user[:5], str(home), *user[6:]))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: made)
    assert (home in secret.default_secret_file().parents) == is_used
    made = pwd.struct_passwd((*user[:5], "/nonexistent", *user[6:]))
    assert secret.default_secret_file() == shm / f"cachefs-secret-{os.geteuid()}"
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # a user without a name, as in containers
    assert secret.default_secret_file() == shm / f"cachefs-secret-{os.geteuid()}"


@pytest.mark.parametrize(("first", "later"), [(0o775, 0o755), (0o755, 0o775)])
def test_daemons_share_the_default_file_though_the_mode_of_the_home_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, later: int
) -> None:
    user = pwd.getpwuid(os.geteuid())
    (home := tmp_path / "home").mkdir()
    (shm := tmp_path / "shm").mkdir()
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: pwd.struct_passwd((*user[:5], str(home), *user[6:])))
    monkeypatch.setattr(secret, "SHM", shm)
    home.chmod(first)
    made = load_secret(section(None))
    home.chmod(later)
    assert load_secret(section(None)) == made


def test_a_default_file_that_is_gone_is_made_again_with_the_same_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state" / "shared"
    monkeypatch.setattr(secret, "default_secret_file", lambda: path)
    made = load_secret(section(None))
    assert made is not None
    path.unlink()
    path.parent.rmdir()
    made.restore_file()
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_secret(section(None)) == made
    path.unlink()
    path.parent.rmdir()
    path.parent.touch()
    with pytest.raises(ConfigError, match=r"was removed and cannot be made again: .*cluster\.secret_file"):
        made.restore_file()


def test_a_file_that_the_configuration_names_is_not_made_again(tmp_path: Path) -> None:
    made = load_secret(section(tmp_path / "secret"))
    assert made is not None
    (tmp_path / "secret").unlink()
    made.restore_file()
    assert not (tmp_path / "secret").exists()


def test_what_another_user_makes_in_dev_shm_keeps_no_daemon_from_its_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = pwd.getpwuid(os.geteuid())
    (home := tmp_path / "home").mkdir(mode=0o700)
    (shm := tmp_path / "shm").mkdir()
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: pwd.struct_passwd((*user[:5], str(home), *user[6:])))
    monkeypatch.setattr(secret, "SHM", shm)
    (shm / f"cachefs-secret-{os.geteuid()}").symlink_to(tmp_path / "elsewhere")
    assert home in secret.default_secret_file().parents


def test_a_node_that_has_certificates_or_asks_for_no_security_needs_none(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    assert load_secret(section(path, insecure_peers=True)) is None
    assert load_secret(section(path, tls_ca=tmp_path / "ca")) is None
    assert load_secret(ClusterSection(secret_file=path)) is None
    assert not path.exists()


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        (b"0123456789abcdef\n", 0o600, ""),
        (b"0123456789abcdef", 0o640, ""),
        (b"0123456789abcdef", 0o644, "0644 lets other users read or change it"),
        (b"0123456789abcdef", 0o660, "0660 lets other users read or change it"),
        (b"0123456789abcde", 0o600, "it has 15 bytes"),
        (b"0" * 65, 0o600, "it has 65 bytes"),
        (b"\n", 0o600, "it has 0 bytes"),
    ],
)
def test_what_a_file_may_be(tmp_path: Path, content: bytes, mode: int, said: str) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    path.chmod(mode)
    if not said:
        assert load_secret(section(path)) == ClusterSecret(b"0123456789abcdef")
        return
    with pytest.raises(ConfigError, match=said) as refused:
        load_secret(section(path))
    assert "cluster.secret_file" in str(refused.value)


def test_what_another_user_may_have_prepared_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").write_bytes(b"0123456789abcdef")
    (tmp_path / "real").chmod(0o600)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(secret, "default_secret_file", lambda: tmp_path / "link")
    with pytest.raises(ConfigError, match="name another file, the same for all daemons of the cluster"):
        load_secret(section(None))
    for name in ("pipe", "none/secret"):
        with pytest.raises(ConfigError, match=r"cluster\.secret_file"):
            load_secret(section(tmp_path / name))
    if os.geteuid() == 0:
        os.chown(tmp_path / "real", 65534, 65534)
        (tmp_path / "real").chmod(0o600)
        with pytest.raises(ConfigError, match="it belongs to user 65534"):
            load_secret(section(tmp_path / "real"))


def test_a_file_that_the_configuration_names_may_be_a_link_and_a_group_may_read_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    (tmp_path / "..data").mkdir()  # as the kubelet mounts a Secret
    (tmp_path / "..data" / "secret").write_bytes(b"0123456789abcdef")
    (tmp_path / "..data" / "secret").chmod(0o440)
    (tmp_path / "secret").symlink_to("..data/secret")
    assert load_secret(section(tmp_path / "secret")) == KEY
    assert "members of group" in caplog.text
    (tmp_path / "..data" / "secret").chmod(0o444)
    with pytest.raises(ConfigError, match="lets other users read"):
        load_secret(section(tmp_path / "secret"))


def greeting(key: ClusterSecret = KEY, port: int = PORT, **change: object) -> Greeting:
    """A greeting with its proof."""
    plain = Greeting("c", member_id(2), member_id(1), member_record(1).incarnation, 7, nonce=make_nonce())
    plain = dataclasses.replace(plain, **change)  # type: ignore[arg-type]
    return dataclasses.replace(plain, proof=key.request_proof(plain.scope(plain.addressee, port)))


def test_only_a_proof_for_this_node_and_this_start_of_it_is_taken() -> None:
    assert judge_greeting(VIEW, "c", greeting(), KEY) is Verdict.WELCOME
    for wrong in (
        greeting(ClusterSecret(b"another-secret-of-it")),
        greeting(port=PORT + 1),  # caught on another port
        dataclasses.replace(greeting(), proof=""),
        dataclasses.replace(greeting(), nonce=make_nonce()),
        dataclasses.replace(greeting(), sender=member_id(3)),
        dataclasses.replace(greeting(addressee=member_id(2)), addressee=member_id(1)),  # caught on another one's port
        dataclasses.replace(greeting(incarnation="e" * 16), incarnation=member_record(1).incarnation),
    ):
        assert judge_greeting(VIEW, "c", wrong, KEY) is Verdict.UNPROVEN
    assert judge_greeting(VIEW, "c", greeting(incarnation=""), KEY) is Verdict.OTHER_INCARNATION
    assert "cluster.secret_file" in explain_verdict(Verdict.UNPROVEN, VIEW, "c", greeting())


def test_an_answer_proves_its_sender_for_one_request() -> None:
    start = "f" * 16
    scope = ProofScope(make_nonce(), member_id(2), member_id(1), start, 7000, "blocks")
    proof = KEY.response_proof(scope, start, serves=True)
    assert proofs_match(proof, KEY.response_proof(dataclasses.replace(scope), start, serves=True))
    others = [
        {"nonce": make_nonce()},
        {"sender": member_id(3)},
        {"addressee": member_id(2)},
        {"incarnation": "e" * 16},
        {"port": 7001},
        {"purpose": "GET /state"},
    ]
    for other in (
        *(KEY.response_proof(dataclasses.replace(scope, **one), start, serves=True) for one in others),  # type: ignore[arg-type]
        KEY.response_proof(scope, "e" * 16, serves=True),
        KEY.response_proof(scope, start, serves=False),
        ClusterSecret(b"another-secret-of-it").response_proof(scope, start, serves=True),
        KEY.request_proof(scope),
    ):
        assert not proofs_match(proof, other)
    assert not proofs_match("", proof)
    assert not proofs_match("\udcff", proof)
    assert "0123" not in repr(KEY)
