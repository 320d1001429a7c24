"""The user's line: libraries' frames are passed over, and so are lines that only wait."""

import inspect

from lightning_memkit.memory.origins import describe, place, places


def line() -> int:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def test_it_is_the_innermost_line_of_the_user() -> None:
    found, expected = place(), line()
    assert found == (__file__, expected)


def test_the_standard_library_and_torch_are_passed_over() -> None:
    import json

    import torch

    seen = []
    json.loads("{}", object_hook=lambda _: seen.append(place()))
    layer = torch.nn.Linear(2, 2)
    layer.register_forward_hook(lambda *_: seen.append(place()))
    layer(torch.ones(1, 2))
    assert [found[0] for found in seen if found] == [__file__, __file__]


def test_a_library_is_named_where_no_user_is() -> None:
    typed_in = {
        one for one in places() if one[0].startswith("<")
    }  # a pytest worker is started by such a line
    found = place(outer={(__file__, line()), *typed_in})
    assert found is not None
    assert "/site-packages/" in found[0]  # pytest's own frame


def test_nothing_is_named_where_all_lines_only_wait() -> None:
    assert place(outer=places() | {(__file__, line())}) is None


def test_generated_code_is_passed_over_and_typed_code_is_not() -> None:
    names = {}
    for name in ("<generated>", "<stdin>"):
        space = {"place": place}
        exec(compile("found = place()", name, "exec"), space)
        names[name] = space["found"]
    assert names["<generated>"][0] == __file__
    assert names["<stdin>"] == ("<stdin>", 1)


def test_paths_are_relative_to_where_one_stands(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert describe((str(tmp_path / "model.py"), 3), "") == "model.py:3"
    assert describe(("/elsewhere/model.py", 3), "") == "/elsewhere/model.py:3"
    assert describe(None, "the forward") == "the forward"
