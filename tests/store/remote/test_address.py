from __future__ import annotations

import pytest

from tokenmill.errors import ConfigError
from tokenmill.store.remote.client import Address, parse_address
from tokenmill.tables import is_address
from tokenmill.types import RemoteOptions

SECRET = "canary-Zx81"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("s3://bucket/stores/web", ("s3", "bucket", "stores/web", None)),
        ("s3://bucket/stores/web/", ("s3", "bucket", "stores/web", None)),
        ("gs://bucket", ("gs", "bucket", "", None)),
        ("az://container/web", ("az", "container", "web", None)),
        ("file:///data/web", ("file", "", "data/web", None)),
        ("s3://b/w?endpoint=http://127.0.0.1:9000/", ("s3", "b", "w", "http://127.0.0.1:9000")),
        ("s3://b/w?endpoint=https://minio.local", ("s3", "b", "w", "https://minio.local")),
    ],
)
def test_an_address_has_a_scheme_a_bucket_a_key_and_an_endpoint(text, parts):
    address = parse_address(text)
    assert (address.scheme, address.bucket, address.key, address.endpoint) == parts
    assert str(address) == text.partition("?")[0].rstrip("/")


def test_what_is_below_an_address_has_an_address():
    address = parse_address("s3://b/w?endpoint=http://localhost:1")
    assert address / "shard-00000/sequence.bin" == Address(
        scheme="s3", bucket="b", key="w/shard-00000/sequence.bin", endpoint="http://localhost:1"
    )
    assert str(parse_address("file:///data") / "web") == "file:///data/web"
    assert str(parse_address("s3://b") / "web") == "s3://b/web"
    assert [item.name for item in (address, parse_address("s3://b"))] == ["w", "b"]


@pytest.mark.parametrize(
    ("path", "remote"),
    [
        ("s3://b/w", True),
        ("ftp://b", True),
        ("web", False),
        ("/data/web", False),
        ("hf:org/name", False),
        (7, False),
    ],
)
def test_a_scheme_makes_a_path_an_address(path, remote):
    assert is_address(path) is remote


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ftp://b/w", r"must begin with s3://, gs://, az://, file://, got ftp://"),
        ("s3:///w", "must name a bucket"),
        ("file://host/w", "must be file:// and a whole path"),
        ("s3://b/a//w", "plain names"),
        ("s3://b/../w", "plain names"),
        (f"s3://user:{SECRET}@b/w", "no user, password"),
        (f"s3://b/w?secret={SECRET}", "endpoint= alone"),
        (f"s3://b/w#{SECRET}", "no user, password"),
        (f"s3://b/w?endpoint=https://user:{SECRET}@host", "leave out users"),
        (f"s3://b/w?endpoint=https://host?sig={SECRET}", "leave out users"),
        ("s3://b/w?endpoint=http://minio.local:9000", "allow_http = true"),
        ("s3://b/w?endpoint=http://127.0.0.1.evil.example", "allow_http = true"),
    ],
)
def test_what_an_address_may_not_say_is_refused_and_no_secret_repeated(text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        parse_address(text)
    assert SECRET not in str(caught.value)


def test_plain_http_to_another_machine_must_be_asked_for_by_name():
    options = RemoteOptions(endpoint="http://minio.local:9000", allow_http=True)
    assert parse_address("s3://b/w", options).endpoint == "http://minio.local:9000"
    assert parse_address("file:///b/w", options).endpoint is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"horizon_bytes": 0}, "horizon_bytes must be more than 0"),
        ({"deadline": 0.0}, "deadline must be more than 0"),
        ({"limit_bytes": -1, "mirror": "m"}, "must not be negative"),
        ({"limit_bytes": 5}, "set `mirror` to a folder"),
    ],
)
def test_options_that_cannot_be_right_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        RemoteOptions(**options)
