"""Names become numbers: the same for the same name, and nothing of the name is left."""

from cachefs_tools.debug_bundle.redaction import Pseudonyms


def test_one_name_has_one_number_in_texts_and_documents() -> None:
    names = Pseudonyms()
    names.add_names("dataset", ["faces", "faces-of-2026"])
    names.add_names("user", ["alice"])
    document = {
        "dataset": "faces",
        "subject": "s3://secret-bucket/faces/alice/1.jpg",
        "message": "s3://secret-bucket/faces/alice/1.jpg is gone; /home/alice/x: no such file; user alice",
        "directory": "/var/lib/cachefs/ssd",
        "bytes": 17,
    }
    clean = names.replace_in_document(document)
    text = str(clean)
    for name in ("faces", "alice", "secret-bucket", "1.jpg", "/home"):
        assert name not in text
    assert clean["dataset"] == "dataset-1"
    assert clean["bytes"] == 17
    assert clean["directory"] == "/var/lib/cachefs/ssd"
    assert names.replace_in_text("faces and faces-of-2026, facesX") == "dataset-1 and dataset-2, facesX"
    assert names.replace_in_document({"mountpoint": "/data/faces"}) == names.replace_in_document(
        {"mountpoint": "/data/faces"}
    )


def test_words_of_cachefs_stay() -> None:
    names = Pseudonyms()
    names.add_names("dataset", ["all", "memory", ""])
    assert (
        names.replace_in_text("all of the memory tier in /dev/shm/cachefs")
        == "all of the memory tier in /dev/shm/cachefs"
    )
    assert names.replace_in_document({"spec": "all"}) == {"spec": "all"}


def test_paths_that_only_begin_like_those_of_the_system_are_names() -> None:
    names = Pseudonyms()
    text = str(
        names.replace_in_document(
            {"mountpoint": "/runs/secret-model", "message": "/library/secret: gone; /run/cachefs"}
        )
    )
    assert "secret" not in text
    assert "/run/cachefs" in text
