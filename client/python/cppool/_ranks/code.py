"""The user's code: found by file, and loaded anew when a file of it has changed."""
import difflib
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import linecache
import os
import re
import sys
import traceback

_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep
_BELOW = re.compile(f"^{re.escape(_OWN)}|^<frozen |/(_pytest|pluggy)/")
# Entries of sys.path that are of an installation: the rank has those of its own Python.
_OF_INSTALLATION = re.compile(r"/(site|dist)-packages/|/lib(64)?/python3[\d.]*t?/")
_INSTALLED = re.compile(r"(^|/)(python\d[\d.]*t?(\.zip)?|lib-dynload|site-packages|dist-packages)/?$")
# Never the user's, wherever they are: items.py is of the pytest that was imported first.
_OF_PYTEST = ("pytest", "_pytest", "pluggy", "iniconfig")

MAX_DIGESTS = 4096
NOT_RUN = "is a coroutine or a generator: a case is an ordinary function (asyncio.run inside of it works)"


preloaded = set()  # names of modules that the fork server was asked to import
signatures = {}  # of the files that it has imported


class CannotLoad(Exception):
    """Text for people: what is wrong with what a request names."""


class CannotReload(CannotLoad):
    """A library or a preloaded module that has changed: a process keeps the one that it has loaded."""


def signature(path):
    """What identifies a file's content; None when it is not there."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


def last_import():
    """Changes with an import, since `sys.modules` keeps the order of insertion. It does not where one module was removed, another imported, and the
    last one imported again."""
    while True:
        try:
            return len(sys.modules), next(reversed(sys.modules))
        except RuntimeError:  # another thread imports
            pass


def until_next_import(look):
    """Keeps what `look` returns until a module is imported. It is for functions that read all modules: a rank that does so copies memory which it
    shares with the fork server, which has called them before."""
    at, found = None, None

    def looked():
        nonlocal at, found
        now = last_import()
        if at != now:
            at, found = now, look()
        return found
    return looked


def files_of_modules(names):
    files = (getattr(sys.modules.get(name), "__file__", None) for name in names)
    return [file for file in files if isinstance(file, str)]


@until_next_import
def modules():
    """The names of all, and the files of those that are not of an installation."""
    names = set(sys.modules)
    return names, [file for file in files_of_modules(names) if not file.startswith(_OWN) and not _OF_INSTALLATION.search(file)]


def is_pytests(name):
    return name.partition(".")[0] in _OF_PYTEST


def traceback_of(error):
    """The traceback's text from the first frame on that is not of this package or of pytest."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and _BELOW.search(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


class Code:
    """What is loaded of the user's code in this rank. Nothing of it is ever reloaded in place: an old function may live on elsewhere."""

    def __init__(self):
        self.preloaded, files = modules()
        self.preloaded_files = {path: signatures.get(path) or signature(path) for path in files}
        self.since, self.seen = set(), last_import()  # names of modules that were imported later, up to this import
        self.base_path = list(sys.path)
        self.roots, self.roots_of = (), None  # and what they were made of
        self.known_digests = {}  # path -> signature, digest
        self.checked = []  # entries of sys.path that find the preloaded modules
        self.files = {}  # of the user -> signature when it was read
        self.imported_before = False
        sys.dont_write_bytecode = True
        # Never from a .pyc file, which is taken for that of another file of the same second and size.
        get_code = importlib.machinery.SourceFileLoader.get_code

        def get_user_code(loader, name):
            path = os.path.abspath(loader.path)
            if not self.is_users(path) or is_pytests(name):
                return get_code(loader, name)
            self.files[path] = signature(path)
            return loader.source_to_code(loader.get_data(path), path)
        importlib.machinery.SourceFileLoader.get_code = get_user_code

    def is_users(self, path):
        return isinstance(path, str) and path.startswith(self.roots) and not path.startswith(_OWN) and not _OF_INSTALLATION.search(path)

    def users_modules(self):
        for name in sys.modules.keys() - self.preloaded:
            module = sys.modules.get(name)
            file = getattr(module, "__file__", None)
            if file in self.files or file is None and any(map(self.is_users, getattr(module, "__path__", ()))):
                yield name

    def drop(self):
        """Forgets all user code; returns the names of its modules."""
        names = sorted(self.users_modules())
        for name in names:
            del sys.modules[name]
        self.since.difference_update(names)
        self.seen = None
        self.files.clear()
        self.note_files()
        importlib.invalidate_caches()
        linecache.checkcache()
        return names

    def changed(self):
        return [path for path, known in self.files.items() if signature(path) != known]

    def digests(self, targets):
        """SHA-256 of the user's files that are loaded, preloaded ones too, and of `targets`; None of one that is not there."""
        files = {*targets, *self.files, *map(os.path.abspath, self.preloaded_files)}
        digests = {}
        for path in sorted(files)[:MAX_DIGESTS]:
            known = signature(path)
            if self.known_digests.get(path, (None,))[0] != known or known is None:
                try:
                    with open(path, "rb") as file:
                        self.known_digests[path] = known, hashlib.sha256(file.read()).hexdigest()
                except OSError:
                    self.known_digests[path] = None, None
            digests[path] = self.known_digests[path][1]
        return digests

    def note_files(self):
        """Remembers which modules are the user's: libraries, and what pytest has rewritten, are not loaded from their text."""
        for path in (*self.preloaded_files, *files_of_modules(name for name in self.since if not is_pytests(name))):
            if path not in self.files and self.is_users(path):
                self.files[path] = self.preloaded_files.get(path) or signature(path)

    def imported(self):
        """Names of modules that were imported since the last call."""
        now = last_import()
        if self.seen == now:
            return set()
        self.seen, before = now, self.since
        self.since = sys.modules.keys() - self.preloaded
        self.note_files()
        return self.since - before

    def check_preloaded(self, path):
        """Throws CannotLoad where the caller's sys.path finds another module first than the one that is imported and stays."""
        if path == self.checked:
            return
        for name in sorted({name.partition(".")[0] for name in preloaded}):
            loaded = getattr(sys.modules.get(name), "__file__", None)
            found = (os.path.join(folder, end) for folder in path for end in (os.path.join(name, "__init__.py"), f"{name}.py"))
            first = next(filter(os.path.isfile, found), None) if loaded else None
            if first and not os.path.samefile(first, loaded):
                raise CannotLoad(f"{first} is another {name} than the one that is preloaded, {loaded}: take its folder off sys.path, or start the "
                                 "pool with it in PYTHONPATH (the option environment)")
        self.checked = path

    def prepare(self, file, frame):
        """file: None where pytest finds the files, of which none may be loaded. Makes what imports depend on that of the request. Returns the modules that were dropped because a file had changed."""
        first = []
        if file is not None:
            if not os.path.isfile(file):
                raise CannotLoad(f"there is no file {file}")
            first = [os.path.dirname(file)] * 2
            while os.path.isfile(os.path.join(first[1], "__init__.py")):
                first[1] = os.path.dirname(first[1])
        given = [entry for entry in frame.get("path", ()) if entry and not _INSTALLED.search(entry)]
        sys.path[:] = dict.fromkeys([*first, *given, *self.base_path])
        roots = [*first[1:], *frame.get("roots", ()), frame.get("cwd"), *(entry for entry in sys.path if not _INSTALLED.search(entry))]
        if roots != self.roots_of:
            self.roots_of = roots
            self.roots = tuple({os.path.join(each(root), "") for root in filter(None, roots) for each in (os.path.realpath, os.path.abspath)})
            self.note_files()
        self.check_preloaded([*given, *self.base_path])
        if frame.get("cwd"):
            try:
                os.chdir(frame["cwd"])
            except OSError as error:
                raise CannotLoad(f'the "cwd" of the request, {frame["cwd"]}, cannot be entered ({error.strerror}): name a folder that is there') from None
        changed = self.changed()
        for path in changed:
            if path.endswith(".so"):
                raise CannotReload(f"{path} has been built again")
            if path in self.preloaded_files:
                raise CannotReload(f"{path}, which is preloaded, has changed")
        dropped = self.drop() if changed or file is None else []
        return dropped if changed else []

    def function(self, target, frame):
        """The function of "file.py:name", and the modules that were dropped for it. Throws CannotLoad, and what the import throws."""
        file, _, name = target.rpartition(":")
        file = os.path.abspath(file)
        dropped = self.prepare(file, frame)
        stem = os.path.splitext(os.path.basename(file))[0]
        folder, packages = os.path.dirname(file), []
        while os.path.isfile(os.path.join(folder, "__init__.py")):
            folder, package = os.path.split(folder)
            packages.insert(0, package)
        stem = ".".join([*packages, stem])
        module = sys.modules.get(stem)
        if module is not None and os.path.abspath(getattr(module, "__file__", None) or "") != file:
            if stem in set(self.users_modules()):  # a file of that name in another folder
                dropped += self.drop()
            else:  # a library's name, which the file must not take from it
                stem = f"_case_{stem}"
            module = sys.modules.get(stem)
        if module is None:
            if packages:
                importlib.import_module(".".join(packages))
            spec = importlib.util.spec_from_file_location(stem, file)
            module = sys.modules[stem] = importlib.util.module_from_spec(spec)
            try:
                spec.loader.exec_module(module)
            except BaseException:
                sys.modules.pop(stem, None)
                raise
        value = module
        for part in name.split("."):
            if not hasattr(value, part):
                near = difflib.get_close_matches(part, [each for each in vars(value) if callable(getattr(value, each))], 1)
                raise CannotLoad(f"{file} has no function {name}" + (f"; did you mean {near[0]}?" if near else ""))
            value = getattr(value, part)
        if not callable(value):
            raise CannotLoad(f"{name} in {file} is no function but {type(value).__name__}")
        if inspect.iscoroutinefunction(value) or inspect.isgeneratorfunction(value) or inspect.isasyncgenfunction(value):
            raise CannotLoad(f"{name} in {file} {NOT_RUN}")
        return value, dropped

    def script(self, file, frame):
        """The path of a script that can be compiled, and the modules that were dropped."""
        file = os.path.abspath(file)
        dropped = self.prepare(file, frame)
        with open(file, "rb") as source:
            compile(source.read(), file, "exec")
        return file, dropped


def arguments_of(function, kwargs, world):
    """`kwargs`, with `world` where the function asks for it. Throws CannotLoad."""
    try:
        signature_ = inspect.signature(function)
    except (TypeError, ValueError):
        return kwargs  # of C code: it says itself what it takes
    if "world" in signature_.parameters and "world" not in kwargs:
        kwargs = {**kwargs, "world": world}
    try:
        signature_.bind(**kwargs)
    except TypeError as error:
        raise CannotLoad(f"the arguments do not fit {name_of(function)}{signature_}: {error}") from None
    return kwargs


def name_of(function):
    """That of its class for an object that can be called."""
    return getattr(function, "__name__", type(function).__name__)


def check_has_run(function, value):
    """Throws CannotLoad where the call has only made what would run, as a wrapper of a coroutine does that looks like an ordinary function."""
    if inspect.isawaitable(value) or inspect.isgenerator(value) or inspect.isasyncgen(value):
        if inspect.iscoroutine(value) or inspect.isgenerator(value):
            value.close()  # without a warning that it was never awaited
        raise CannotLoad(f"{name_of(function)} {NOT_RUN}")
