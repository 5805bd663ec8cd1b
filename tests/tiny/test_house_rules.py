"""House lints, each one a mistake that somebody made once. CONTRIBUTING.md lists the rules."""

from __future__ import annotations

import ast
import re
import statistics
from collections.abc import Iterator

import pytest

from tests.tiny.tree import ROOT, modules, texts

MAX_LINES = 500
DEVICE = re.compile(r"(cuda|hip|rocm|xpu|mps)(:\d+)?")
PATH = re.compile(r"(?<![\w./<*-])(?:plait|tests|docs|benchmarks|examples)/[\w./*-]*[\w/*]")
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
LOCAL = re.compile(r"(?<![\w.*])/(?:work|root|home|opt|tmp|mnt|Users)/")


def _calls(tree: ast.Module, *names: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in names:
            yield node


def device_strings(tree: ast.Module) -> list[int]:
    """Lines with a literal device. Descriptions of hardware name one, a comparison only asks."""
    exempt: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            exempt |= {id(each) for each in (node.left, *node.comparators)}
    for call in _calls(tree, "GPUTarget", "DeviceInfo"):
        exempt |= {id(each) for each in call.args}
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and DEVICE.fullmatch(node.value)
        and id(node) not in exempt
    ]


def environment_reads(tree: ast.Module) -> list[int]:
    """Lines that touch the process's environment."""
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    found = []
    for node in ast.walk(tree):
        if (isinstance(node, ast.Attribute) and ast.unparse(node).removeprefix("os.") in names) or (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and names & {alias.name for alias in node.names}
        ):
            found.append(node.lineno)
    return found


def prints(tree: ast.Module) -> list[int]:
    """Lines that print."""
    return [call.lineno for call in _calls(tree, "print") if isinstance(call.func, ast.Name)]


def swallowed(tree: ast.Module) -> list[int]:
    """Lines where any exception at all is caught and dropped."""
    broad = {"", "Exception", "BaseException"}
    found = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler)
        and (ast.unparse(node.type) if node.type else "") in broad
        and all(isinstance(each, (ast.Pass, ast.Continue, ast.Expr)) for each in node.body)
        and not any(isinstance(each, ast.Call) for body in node.body for each in ast.walk(body))
    ]
    for call in _calls(tree, "suppress"):
        found += [call.lineno] * bool(broad & {ast.unparse(each) for each in call.args})
    return found


def bare_asserts(tree: ast.Module) -> list[int]:
    """Lines with an assert that shows no values."""
    return [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert) and not node.msg]


def future_annotations(tree: ast.Module) -> list[int]:
    """Lines that turn annotations into strings although a Triton kernel in the file needs them."""
    return [
        node.lineno
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        and node.module == "__future__"
        and any(
            ast.unparse(decorator).split("(")[0] in ("triton.jit", "jit")
            for each in ast.walk(tree)
            if isinstance(each, ast.FunctionDef)
            for decorator in each.decorator_list
        )
    ]


def missing_paths(text: str) -> list[str]:
    """Paths of this tree that `text` names and that do not exist; `*` needs one match."""
    found = []
    for match in PATH.finditer(text):
        path, after = match.group(), text[match.end() :]
        if after.startswith(("<", "{")):
            continue  # a pattern such as docs/design/<op>.md
        exists = any(ROOT.glob(path.rstrip("/"))) if "*" in path else (ROOT / path).exists()
        if not exists:
            found.append(path)
    return found


def _docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ""


def _report(rule, folders: tuple[str, ...], keep=lambda path: True) -> None:
    lines = [
        f"{path}:{line}" for path, tree in modules(*folders) if keep(path) for line in rule(tree)
    ]
    assert not lines, f"{rule.__doc__}\n" + "\n".join(lines)


def test_file_length():
    sizes = {
        path: len(text.splitlines())
        for path, text in texts()
        if path.endswith(".py") and path.split("/")[0] in ("plait", "tests", "benchmarks")
    }
    package = [size for path, size in sizes.items() if path.startswith("plait/")]
    print(f"plait: {len(package)} files, median {statistics.median(package):g} lines")
    too_long = {path: size for path, size in sizes.items() if size > MAX_LINES}
    assert not too_long, f"over {MAX_LINES} lines: {too_long}"


def test_no_device_strings():
    _report(device_strings, ("tests", "examples"), lambda path: not path.endswith("conftest.py"))


def test_environment_only_in_settings():
    _report(environment_reads, ("plait",), lambda path: path != "plait/settings.py")


def test_no_print_in_the_library():
    _report(prints, ("plait",), lambda path: not path.startswith("plait/cli/"))


def test_nothing_is_swallowed():
    _report(swallowed, ("plait", "tests", "benchmarks", "examples"))


def test_asserts_in_public_functions_speak():
    _report(bare_asserts, ("plait",), lambda path: path.endswith("/api.py"))


def test_kernel_files_keep_their_annotations():
    _report(future_annotations, ("plait", "tests", "benchmarks", "examples"))


def test_paths_in_documents_exist():
    missing = []
    for path, text in texts():
        if path.endswith(".md"):
            folder = (ROOT / path).parent
            missing += [f"{path}: {each}" for each in missing_paths(text)]
            links = LINK.findall(text)
            missing += [f"{path}: link {each}" for each in links if not (folder / each).exists()]
    assert not missing, "\n".join(missing)


def test_paths_in_docstrings_exist():
    missing = [
        f"{path}: {each}"
        for path, tree in modules("plait", "tests", "benchmarks", "examples")
        if path != "tests/tiny/test_house_rules.py"
        for docstring in _docstrings(tree)
        for each in missing_paths(docstring)
    ]
    assert not missing, "\n".join(missing)


def test_no_local_paths():
    found = [
        f"{path}:{number}: {line.strip()}"
        for path, text in texts()
        if path != "tests/tiny/test_house_rules.py"
        for number, line in enumerate(text.splitlines(), 1)
        if LOCAL.search(line) or re.search(r"\.\./shared\b", line)
    ]
    assert not found, "a path that only exists on one machine\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        (device_strings, "x.to('cuda')"),
        (device_strings, "f(device='cuda:0')"),
        (environment_reads, "import os\nx = os.environ['A']"),
        (environment_reads, "import os\nx = os.getenv('A')"),
        (environment_reads, "from os import environ"),
        (prints, "print(1)"),
        (swallowed, "try:\n    f()\nexcept:\n    pass"),
        (swallowed, "try:\n    f()\nexcept Exception:\n    ..."),
        (
            swallowed,
            "for x in y:\n    try:\n        f()\n    except BaseException:\n        continue",
        ),
        (swallowed, "with contextlib.suppress(Exception):\n    f()"),
        (bare_asserts, "assert x"),
        (future_annotations, "from __future__ import annotations\n@triton.jit\ndef f(): ..."),
    ],
)
def test_a_breach_is_found(rule, code):
    assert len(rule(ast.parse(code))) == 1


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        (device_strings, "device.type == 'cuda'\nGPUTarget('cuda', 90, 32)\n'cuda graphs'"),
        (environment_reads, "settings().environ_like"),
        (prints, "console.print(1)"),
        (swallowed, "try:\n    f()\nexcept KeyError:\n    pass"),
        (swallowed, "try:\n    f()\nexcept Exception as e:\n    log(e)"),
        (swallowed, "with contextlib.suppress(KeyError):\n    f()"),
        (bare_asserts, "assert x, f'{x=}'"),
        (future_annotations, "@triton.jit\ndef f(): ..."),
    ],
)
def test_a_decent_file_is_let_through(rule, code):
    assert rule(ast.parse(code)) == []


def test_missing_paths_are_found():
    assert missing_paths("see plait/errors.py, `docs/` and tests/*/test_settings.py.") == []
    assert missing_paths("plait/<op>/api.py, docs/design/<op>.md, other/plait/x.py") == []
    assert missing_paths("see plait/nowhere.py.") == ["plait/nowhere.py"]
    assert missing_paths("tests/*/nowhere.py") == ["tests/*/nowhere.py"]
