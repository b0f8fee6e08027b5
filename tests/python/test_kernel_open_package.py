# SPDX-License-Identifier: MIT
"""Building and installing: where the source is found, the prepared tree, and the DKMS package made of it."""

import fcntl
import os
import re
import shutil
import subprocess

import pytest
from test_kernel_open_insert import KERNEL_OPEN, snapshot, vendor_tree

import build  # noqa: E402
import install  # noqa: E402
import load  # noqa: E402
import source  # noqa: E402
import tree as build_tree  # noqa: E402
from hooks import HOOKS  # noqa: E402

UVM_EXT = KERNEL_OPEN.parent / "uvm_ext"


def driver(root, release, extra=()):
    """A vendor tree with all folders that a build needs, and some things that it does not."""
    vendor_tree(root, release)
    for name in ("common/inc/nv.h", "nvidia/nvidia.Kbuild", "conftest.sh", "Makefile", *extra):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return root


# ---- features -----------------------------------------------------------------------------------------------


def test_features_are_looked_for_in_the_tree(tmp_path):
    (tmp_path / "uvm_gpu.h").write_text("int max_vidmem_page_size;\n")
    listed = tmp_path / "list"
    wanted = ("# a comment", "", "HAS_SIZE uvm_gpu.h max_vidmem_page_size;", "HAS_CALL uvm_gpu.h uvm_call\\(",
              "HAS_FILE gone.h anything")  # fmt: skip
    listed.write_text("\n".join(wanted))
    lines = build_tree.features(tmp_path, listed).splitlines()
    assert lines[-3:] == ["#define HAS_SIZE 1", "#define HAS_CALL 0", "#define HAS_FILE 0"]


def test_every_feature_is_used_and_every_used_one_is_listed():
    listed = {line.split()[0] for line in (UVM_EXT / "features.list").read_text().splitlines() if line[:1].isalpha()}
    code = "".join(path.read_text() for path in UVM_EXT.glob("*.[ch]"))
    assert listed == set(re.findall(r"\bUVM_VMEM_HAS_\w+", code))


# ---- what kernel-open and uvm_ext know of each other --------------------------------------------------------


def test_the_hooks_call_what_the_extension_declares():
    header = (UVM_EXT / "uvm_vmem_hooks.h").read_text()
    called = set(re.findall(r"\b(uvm_vmem_\w+)\(", "".join(hook.before + hook.after for hook in HOOKS)))
    assert len(called) == 6
    for name in called:
        assert re.search(rf"\b{name}\(", header), name


def test_the_parameter_that_tells_a_patched_module_is_one_of_its():
    code = "".join(path.read_text() for path in UVM_EXT.glob("*.c"))
    assert f"module_param({load._PARAMETER}," in code


# ---- where the driver's source comes from -------------------------------------------------------------------


def test_the_newest_installed_tree_is_taken(tmp_path):
    for release in ("535.261.03", "550.163.01", "550.90.07"):
        driver(tmp_path / f"usr/src/nvidia-{release}", release)
    assert source.nvidia(root=tmp_path)[1] == "550.163.01"
    assert source.nvidia(root=tmp_path, want="535")[1] == "535.261.03"
    assert source.nvidia(root=tmp_path, want="550.90.07")[1] == "550.90.07"


def test_the_loaded_drivers_tree_comes_before_a_newer_one(tmp_path):
    for release in ("535.261.03", "550.163.01"):
        driver(tmp_path / f"usr/src/nvidia-current-{release}", release)
    loaded = tmp_path / "sys/module/nvidia/version"
    loaded.parent.mkdir(parents=True)
    loaded.write_text("535.261.03\n")
    assert source.nvidia(root=tmp_path)[1] == "535.261.03"


def test_another_release_than_the_loaded_drivers_is_built_only_where_it_is_asked_for(tmp_path):
    driver(tmp_path / "usr/src/nvidia-550.163.01", "550.163.01")
    loaded = tmp_path / "sys/module/nvidia/version"
    loaded.parent.mkdir(parents=True)
    loaded.write_text("535.261.03\n")
    with pytest.raises(source.SourceError, match="535.261.03.*550.163.01.*NVIDIA_RELEASE"):
        source.nvidia(root=tmp_path)
    assert source.nvidia(root=tmp_path, want="550")[1] == "550.163.01"
    assert source.nvidia(src=tmp_path / "usr/src/nvidia-550.163.01", root=tmp_path)[1] == "550.163.01"


def test_our_own_package_is_no_source(tmp_path):
    driver(tmp_path / "usr/src/nvidia-535.261.03", "535.261.03")
    driver(tmp_path / "usr/src/nvidia-uvm-vmem-550.163.01", "550.163.01")
    assert source.nvidia(root=tmp_path)[1] == "535.261.03"


def test_a_named_tree_may_be_a_checkout(tmp_path):
    driver(tmp_path / "checkout/kernel-open", "580.142")
    assert source.nvidia(src=tmp_path / "checkout") == (tmp_path / "checkout/kernel-open", "580.142")


@pytest.mark.parametrize("want", ["5", "550.16", "535"])
def test_a_named_tree_of_another_release_is_refused(tmp_path, want):
    driver(tmp_path, "550.163.01")
    with pytest.raises(source.SourceError, match=f"550.163.01.*{want}"):
        source.nvidia(src=tmp_path, want=want)


def test_a_folder_without_source_is_refused(tmp_path):
    with pytest.raises(source.SourceError, match="no nvidia-uvm/"):
        source.nvidia(src=tmp_path)


def test_without_a_tree_or_debian_it_says_what_to_set(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(source.SourceError, match="NVIDIA_SRC"):
        source.nvidia(root=tmp_path, cache=tmp_path)


def test_an_unpacked_package_is_taken_without_fetching_it_again(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    driver(tmp_path / "cache/550.163.01", "550.163.01")
    assert source.nvidia(root=tmp_path, cache=tmp_path / "cache", want="550")[1] == "550.163.01"


def headers(root, kernel):
    path = root / "lib/modules" / kernel / "build/Makefile"
    path.parent.mkdir(parents=True)
    path.write_text("")


def test_the_running_kernel_is_built_for_and_another_only_where_it_is_named(tmp_path):
    headers(tmp_path, "6.1.0-9-amd64")
    headers(tmp_path, "6.1.0-56-amd64")
    running = os.uname().release
    with pytest.raises(source.SourceError, match=f"linux-headers-{running}.*KERNEL=6.1.0-56-amd64"):
        source.kernel(root=tmp_path)
    assert source.kernel("newest", root=tmp_path) == "6.1.0-56-amd64"
    assert source.kernel("6.1.0-9-amd64", root=tmp_path) == "6.1.0-9-amd64"
    headers(tmp_path, running)
    assert source.kernel(root=tmp_path) == running


def test_a_kernel_without_headers_is_refused(tmp_path):
    headers(tmp_path, "6.1.0-9-amd64")
    with pytest.raises(source.SourceError, match="linux-headers-6.2.0"):
        source.kernel("6.2.0", root=tmp_path)
    for want in (None, "newest"):
        with pytest.raises(source.SourceError, match="no (kernel )?headers"):
            source.kernel(want, root=tmp_path / "empty", install=False)


def test_a_second_build_stays_out_of_the_tree_of_the_first(tmp_path):
    tree = tmp_path / "module/550.163.01-release"
    with build._locked(tree):
        with pytest.raises(source.SourceError, match="another build.*550.163.01-release"), build._locked(tree):
            pass
    with build._locked(tree):
        pass


def test_two_commands_do_not_fetch_at_once(tmp_path, monkeypatch):
    """One make builds for two releases side by side, and apt-get locks its lists."""

    def fetch(want, cache):
        with open(cache / "lock", "w") as second, pytest.raises(BlockingIOError):
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return cache / want, want

    monkeypatch.setattr(source, "_fetch_debian", fetch)
    for want in "535", "550":  # the first has let go of it
        assert source.nvidia(want=want, cache=tmp_path / "nvidia", root=tmp_path)[1] == want


# ---- the prepared tree --------------------------------------------------------------------------------------


def test_the_tree_holds_what_the_build_needs_and_leaves_the_source_alone(tmp_path):
    litter = ("nvidia-uvm/uvm.o", "nvidia-uvm/.uvm.o.cmd", "nvidia/nv-kernel.o_binary", "conftest/x.h",
              "nvidia-drm/drm.c", "Module.symvers")  # fmt: skip
    src = driver(tmp_path / "src", "550.163.01", litter)
    before = snapshot(src)
    tree = tmp_path / "tree"
    build_tree.prepare(src, tree)
    assert snapshot(src) == before
    assert "vMem" in (tree / "nvidia-uvm/uvm.c").read_text()
    for name in ("Kbuild", "Makefile", "conftest.sh", "common/inc/nv.h", "nvidia/nvidia.Kbuild", "vmem.mk",
                 "stock-symvers.sh", f"nvidia-uvm/uvm_ext/{build_tree.FEATURES}"):  # fmt: skip
        assert (tree / name).is_file(), name
    for name in litter:
        assert not (tree / name).exists(), name
    ours = tree / "nvidia-uvm/uvm_ext"
    for path in UVM_EXT.glob("*.[ch]"):
        assert (ours / path.name).read_text() == path.read_text()


def test_every_source_that_our_kbuild_names_is_there(tmp_path):
    build_tree.prepare(driver(tmp_path / "src", "550.163.01"), tmp_path / "tree")
    script = "include nvidia-uvm/uvm_ext/uvm_ext.Kbuild\nall: ; @echo $(NVIDIA_UVM_SOURCES)\n"
    done = subprocess.run(["make", "-sf", "-"], cwd=tmp_path / "tree", input=script, capture_output=True, text=True)
    names = done.stdout.split()
    assert names
    for name in names:
        assert (tmp_path / "tree" / name).is_file(), name


def test_preparing_again_touches_only_what_changed(tmp_path):
    src, tree = driver(tmp_path / "src", "550.163.01"), tmp_path / "tree"
    build_tree.prepare(src, tree)
    times = {path: path.stat().st_mtime_ns for path in tree.rglob("*") if path.is_file()}
    old = tree / "nvidia-uvm/uvm_ext/uvm_vmem_ioctl.h"
    old.write_text("// an older one\n")
    (old.parent / "uvm_vmem_gone.c").write_text("// no longer in the repository\n")
    build_tree.prepare(src, tree)
    assert old.read_text() == (UVM_EXT / old.name).read_text()
    after = {path: path.stat().st_mtime_ns for path in tree.rglob("*") if path.is_file()}
    assert after.keys() == times.keys()
    assert [path for path in times if after[path] != times[path]] == [old]


# ---- the DKMS package ---------------------------------------------------------------------------------------

# Knows what was added and installed, and fails the step that DKMS_FAILS names.
DKMS = r"""#!/bin/sh
echo "$*" >>"$DKMS_LOG"
[ -z "$MAKELEVEL$CC" ] || { echo "dkms: MAKELEVEL or CC in the environment"; exit 9; }
case $1 in
status) cat "$DKMS_STATUS" ;;
add) echo "$3/$5: added" >>"$DKMS_STATUS" ;;
remove) sed -i "\\#^$3/$5[,:]#d" "$DKMS_STATUS" ;;
esac
[ "$1" = "$DKMS_FAILS" ] && { rm "$DKMS_BIN/fails-once" 2>/dev/null && { echo "the compiler's words"; exit 10; }; }
exit 0
"""


@pytest.fixture
def dkms(tmp_path, monkeypatch):
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "dkms").write_text(DKMS)
    (folder / "dkms").chmod(0o755)
    (tmp_path / "status").write_text("")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("DKMS_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("DKMS_STATUS", str(tmp_path / "status"))
    monkeypatch.setenv("DKMS_BIN", str(folder))
    monkeypatch.setenv("MAKELEVEL", "1")
    monkeypatch.setenv("CC", "make[1]: Entering directory")
    return lambda: [line.split(" --dkmstree")[0] for line in (tmp_path / "log").read_text().splitlines()]


def test_the_package_is_whole_and_needs_nothing_else(tmp_path):
    root = tmp_path / "root"
    folder = install.package(driver(tmp_path / "src", "550.163.01"), "550.163.01", root)
    assert folder == root / "usr/src/nvidia-uvm-vmem-550.163.01"
    conf = (folder / "dkms.conf").read_text()
    assert 'PACKAGE_NAME="nvidia-uvm-vmem"' in conf and 'PACKAGE_VERSION="550.163.01"' in conf
    assert 'AUTOINSTALL="yes"' in conf and "@" not in conf
    assert 'DEST_MODULE_NAME[0]="nvidia-uvm-vmem"' in conf, "the stock module must keep its name"
    assert (folder / "nvidia-uvm/uvm_ext/uvm_ext.Kbuild").is_file()
    for script in ("vmem.mk", "stock-symvers.sh", "modprobe-uvm.sh"):
        assert "python" not in (folder / script).read_text()
    # Each of the scripts that the build calls is there, and nothing points back to this repository.
    for name in re.findall(r"\./([\w-]+\.sh)", (folder / "vmem.mk").read_text()):
        assert (folder / name).is_file()
    for path in folder.rglob("*"):
        assert not path.is_symlink()
        assert not path.is_file() or str(KERNEL_OPEN.parent) not in path.read_text()


def changes(calls):
    return [call for call in calls if not call.startswith("status")]


def test_install_adds_builds_and_installs_for_the_kernel(tmp_path, dkms):
    src = driver(tmp_path / "src", "550.163.01")
    install.install(src, "550.163.01", "6.1.0-test", root=tmp_path / "root")
    name = "-m nvidia-uvm-vmem -v 550.163.01"
    assert changes(dkms()) == [f"add {name}", f"build {name} -k 6.1.0-test", f"install {name} -k 6.1.0-test"]
    assert not (tmp_path / "root/etc").exists(), "what modprobe loads is not changed unasked"


@pytest.mark.parametrize("stock", [True, False])
def test_a_module_without_symbol_versions_says_so(tmp_path, stock):
    """DKMS shows no build's output: what make says is found in its log."""
    shutil.copy(KERNEL_OPEN / "vmem.mk", tmp_path)
    (tmp_path / "stock-symvers.sh").write_text("#!/bin/sh\n" + ("echo >$2\n" if stock else "exit 1\n"))
    done = subprocess.run(["make", "-n", "-f", "vmem.mk", "KERNEL_UNAME=6.1.0-test", "clean"], cwd=tmp_path,
                          env=build_tree.kbuild_environment(), capture_output=True, text=True)  # fmt: skip
    log = tmp_path / "root/var/lib/dkms/nvidia-uvm-vmem/550.163.01/6.1.0-test/x86_64/log/make.log"
    log.parent.mkdir(parents=True)
    log.write_text(f"DKMS make.log\n{done.stderr}{done.stdout}\n")
    said = build_tree.unversioned(install._build_log(tmp_path / "root", "550.163.01"))
    assert (said is None) == stock
    assert stock or "for 6.1.0-test, so the kernel will not notice" in said


def test_install_takes_an_older_release_away_afterwards(tmp_path, dkms):
    (tmp_path / "status").write_text("nvidia-uvm-vmem/535.261.03, 6.1.0-test, x86_64: installed\n")
    old = tmp_path / "root/usr/src/nvidia-uvm-vmem-535.261.03"
    old.mkdir(parents=True)
    install.install(driver(tmp_path / "src", "550.163.01"), "550.163.01", "6.1.0-test", root=tmp_path / "root")
    assert changes(dkms())[-1] == "remove -m nvidia-uvm-vmem -v 535.261.03 --all"
    assert not old.exists()


@pytest.mark.parametrize("step", ["build", "install"])
@pytest.mark.parametrize("before", [None, "535.261.03", "550.163.01"])
def test_an_install_that_fails_leaves_what_was_there(tmp_path, dkms, monkeypatch, step, before):
    root = tmp_path / "root"
    if before:
        (tmp_path / "status").write_text(f"nvidia-uvm-vmem/{before}, 6.1.0-test, x86_64: installed\n")
        old = root / f"usr/src/nvidia-uvm-vmem-{before}"
        old.mkdir(parents=True)
        (old / "dkms.conf").write_text("the old one")
    monkeypatch.setenv("DKMS_FAILS", step)
    (tmp_path / "bin/fails-once").touch()
    with pytest.raises(source.SourceError, match=rf"dkms {step}.*exited 10:\nthe compiler's words"):
        install.install(driver(tmp_path / "src", "550.163.01"), "550.163.01", "6.1.0-test", root=root)
    assert install.versions(root) == ([before] if before else [])
    folders = sorted(path.name for path in (root / "usr/src").iterdir())
    assert folders == ([f"nvidia-uvm-vmem-{before}"] if before else [])
    if before:
        assert (old / "dkms.conf").read_text() == "the old one"
    if before == "550.163.01":
        assert changes(dkms())[-1].startswith("install"), "it is built again"


def test_the_drivers_own_package_is_built_first(tmp_path, dkms):
    (tmp_path / "status").write_text("nvidia-current-open/550.163.01, 6.1.0-test, x86_64: installed\n"
                                     "nvidia-current/535.261.03: added\nzfs/2.1.11: added\n")  # fmt: skip
    install.install(driver(tmp_path / "src", "550.163.01"), "550.163.01", "6.1.0-test", root=tmp_path / "root")
    conf = (tmp_path / "root/usr/src/nvidia-uvm-vmem-550.163.01/dkms.conf").read_text()
    assert re.findall(r'^BUILD_DEPENDS\[\d\]="(.*)"', conf, re.M) == ["nvidia-current-open"]


def test_boot_writes_one_modprobe_file_and_remove_takes_it_away(tmp_path, dkms):
    root = tmp_path / "root"
    install.install(driver(tmp_path / "src", "550.163.01"), "550.163.01", "6.1.0-test", boot=True, root=root)
    conf = list((root / "etc/modprobe.d").iterdir())
    assert len(conf) == 1
    line = next(line for line in conf[0].read_text().splitlines() if line.startswith("install nvidia-uvm "))
    script = line.split()[3]
    assert (root / script.lstrip("/")).is_file() and line.split()[4] == "550.163.01"
    install.remove(root)
    assert not conf[0].exists()


MODPROBE = r"""#!/bin/sh
for word; do case $word in -*) ;; *) name=$word; break ;; esac; done
[ "$1" = --showconfig ] && { cat "$VMEM_ROOT/config"; exit 0; }
echo "$*" >>"$VMEM_ROOT/log"
case " $FAILS " in *" $name "*) exit 1 ;; esac
"""


@pytest.mark.parametrize(
    "loaded, fails, calls, status",
    [
        ("550.163.01", "", ["nvidia", "nvidia-uvm-vmem o=1 p=2 q=3 a=1"], 0),
        ("535.261.03", "", ["nvidia", "--ignore-install --quiet nvidia-uvm a=1"], 0),
        ("550.163.01", "nvidia-uvm-vmem", ["nvidia", "nvidia-uvm-vmem o=1 p=2 q=3 a=1",
                                           "--ignore-install --quiet nvidia-uvm a=1"], 0),
        ("535.261.03", "nvidia-uvm", ["nvidia", "--ignore-install --quiet nvidia-uvm a=1",
                                      "--ignore-install --quiet nvidia-current-open-uvm a=1"], 0),
        ("550.163.01", "nvidia", ["nvidia"], 1),
    ],
    ids=["ours", "other release", "ours fails", "Debian's name", "no driver"],
)  # fmt: skip
@pytest.mark.parametrize("path", [f":{os.environ['PATH']}", ""], ids=["whole PATH", "PATH=/sbin"])
def test_modprobe_falls_back_to_the_stock_module(tmp_path, loaded, fails, calls, status, path):
    """Nor is it the stock module where nvidia-modprobe calls, whose PATH has modprobe's folder alone."""
    (tmp_path / "modprobe").write_text(MODPROBE)
    (tmp_path / "modprobe").chmod(0o755)
    version = tmp_path / "sys/module/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text(loaded + "\n")
    # modprobe itself adds what is configured for the name that it is given.
    (tmp_path / "config").write_text("alias nvidia_uvm x\noptions nvidia_uvm o=1\noptions nvidia_current_uvm p=2 q=3\n"
                                     "options nvidia_modeset m=1\n")  # fmt: skip
    env = {"PATH": f"{tmp_path}{path}", "VMEM_ROOT": str(tmp_path), "FAILS": fails}
    command = [shutil.which("sh"), KERNEL_OPEN / "modprobe-uvm.sh", "550.163.01", "a=1"]
    assert subprocess.run(command, env=env, stderr=subprocess.DEVNULL).returncode == status
    assert (tmp_path / "log").read_text().splitlines() == calls


STOCK_MODINFO = r"""#!/bin/sh
case "$*" in *"-n nvidia-uvm"*) echo /stock.ko ;; *"-F version /stock.ko"*) echo 550.163.01 ;; esac
"""
STOCK_MODPROBE = r"""#!/bin/sh
printf '0x11111111\tmodule_layout\n0x2222abcd\tnvUvmInterfaceFoo\n0x3333abcd\tnvUvmInterfaceBar\n'
"""


@pytest.mark.parametrize("release, there", [("550.163.01", True), ("550.90.07", False)])
def test_symbol_versions_come_from_the_stock_module_of_the_same_release(tmp_path, release, there):
    for name, text in (("modinfo", STOCK_MODINFO), ("modprobe", STOCK_MODPROBE)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    vendor_tree(tmp_path, release)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["sh", KERNEL_OPEN / "stock-symvers.sh", "6.1.0-test", "out"]
    done = subprocess.run(command, cwd=tmp_path, env=env)
    assert (done.returncode == 0) == there
    assert (tmp_path / "out").exists() == there
    if there:
        expected = [f"0x{crc}\tnvUvmInterface{name}\tnvidia\tEXPORT_SYMBOL\t"
                    for crc, name in (("2222abcd", "Foo"), ("3333abcd", "Bar"))]  # fmt: skip
        assert (tmp_path / "out").read_text().splitlines() == expected
