#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Gathers what an image needs from an installed Debian: the files of some packages and of all that they depend on, their
licences, dpkg's record of them, and a bill of materials in SPDX 2.3.

usage: gather.py --packages NAME,… --user UID:GID --to FOLDER
"""

import argparse
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess

# Packages that other packages name as needed: their maintainer scripts have run already, they are a package manager's, or of
# tools that are left out.
LEFT_OUT = {
    "adduser",
    "init-system-helpers",
    "debconf",
    "dpkg",
    "apt",
    "perl-base",
    "passwd",
    "debianutils",
    "openssl",
    "python3",
}
UCX = pathlib.Path("/opt/ucx")  # a newer release than Debian's
SBOM = "usr/share/doc/ashlar/sbom.spdx.json"
NOT_NEEDED = re.compile(
    r"^/usr/share/(man|info|locale|lintian|bug|doc/(?!.*/copyright$))"
    r"|^/usr/share/(bash-completion|zsh|fish|ashlar)|^/usr/bin/ashlar-|^/lib/systemd|^/etc/(init\.d|default|cron)"
)


def query(package, field):
    return subprocess.run(
        ["dpkg-query", "-W", f"-f=${{{field}}}", package], capture_output=True, text=True, check=True
    ).stdout


def installed(name):
    done = subprocess.run(
        ["dpkg-query", "-W", "-f=${db:Status-Status}", name], capture_output=True, text=True, check=False
    )
    return done.returncode == 0 and done.stdout.startswith("installed")


def providers():
    """Virtual packages, with the installed packages that provide them."""
    found = {}
    for line in subprocess.run(
        ["dpkg-query", "-W", "-f=${Package}\t${Provides}\n"], capture_output=True, text=True, check=True
    ).stdout.splitlines():
        package, provides = line.split("\t")
        for name in re.findall(r"[a-z0-9][a-z0-9+.-]+(?= *[(,]|$)", provides):
            found.setdefault(name, package)
    return found


def closure(names):
    """These packages and all that they depend on, in order of their names. Of alternatives, those that are installed."""
    found, left, virtual = {}, list(names), providers()
    while left:
        name = left.pop()
        if name in found or name in LEFT_OUT:
            continue
        needs = ",".join(query(name, field) for field in ("Depends", "Pre-Depends"))
        wanted = [word.split("(")[0].split(":")[0].strip() for word in re.split(r"[,|]", needs)]
        named = [each if installed(each) else virtual.get(each, "") for each in wanted if each]
        found[name] = [each for each in named if each and each not in LEFT_OUT and installed(each)]
        left += found[name]
    return dict(sorted(found.items()))


def files(package):
    for path in subprocess.run(
        ["dpkg-query", "-L", package], capture_output=True, text=True, check=True
    ).stdout.splitlines():
        if not NOT_NEEDED.search(path) and os.path.lexists(path):
            yield path


def checksums(package, to):
    """dpkg's checksums of the package's files that are under `to`, by which a scanner knows whose file it sees."""
    done = subprocess.run(
        ["dpkg-query", "--control-show", package, "md5sums"], capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines() if done.returncode == 0 else []  # a package that only has links has none
    return "".join(f"{line}\n" for line in sorted(lines) if os.path.lexists(to / line.split(maxsplit=1)[1]))


def copy(path, to):
    """A file or a link under `to`. Links of folders are followed: /lib is /usr/lib."""
    real = pathlib.Path(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    target = to / real.relative_to("/")
    if real.is_dir() and not real.is_symlink():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if not os.path.lexists(target):
        shutil.copy2(real, target, follow_symlinks=False)


def licences(package):
    """The names in a machine-readable copyright file; NOASSERTION where there are none."""
    file = pathlib.Path("/usr/share/doc", package, "copyright")
    names = re.findall(r"^License: *([\w.+-]+)", file.read_text(errors="replace"), re.M) if file.exists() else []
    return " AND ".join(f"LicenseRef-{name}" for name in sorted(set(names))) or "NOASSERTION"


def bill_of_materials(packages):
    """An SPDX document. Its name binds names and versions, so that equal images have equal documents."""
    entries, relations = [], []
    for name, needs in packages.items():
        version, source = query(name, "Version"), query(name, "source:Package")
        architecture = query(name, "Architecture")
        entries.append(
            {
                "SPDXID": f"SPDXRef-{name}",
                "name": name,
                "versionInfo": version,
                "downloadLocation": "NOASSERTION",
                "filesAnalyzed": False,
                "licenseConcluded": "NOASSERTION",
                "licenseDeclared": licences(name),
                "copyrightText": "NOASSERTION",
                "supplier": f"Person: {query(name, 'Maintainer')}",
                "sourceInfo": f"source package {source} {query(name, 'source:Version')}",
                "externalRefs": [
                    {
                        "referenceCategory": "PACKAGE-MANAGER",
                        "referenceType": "purl",
                        "referenceLocator": f"pkg:deb/debian/{name}@{version}?arch={architecture}",
                    }
                ],
            }
        )
        relations.append(
            {
                "spdxElementId": "SPDXRef-DOCUMENT",
                "relationshipType": "DESCRIBES",
                "relatedSpdxElement": f"SPDXRef-{name}",
            }
        )
        relations += [
            {
                "spdxElementId": f"SPDXRef-{name}",
                "relationshipType": "DEPENDS_ON",
                "relatedSpdxElement": f"SPDXRef-{each}",
            }
            for each in sorted(set(needs))
        ]
    extracted = sorted(
        {each for entry in entries for each in re.findall(r"LicenseRef-[\w.+-]+", entry["licenseDeclared"])}
    )
    digest = hashlib.sha256(json.dumps(entries).encode()).hexdigest()
    return {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": "ashlar",
        "documentNamespace": f"https://ashlar.invalid/sbom/{digest}",
        "creationInfo": {"created": "1970-01-01T00:00:00Z", "creators": ["Tool: ashlar-gather"]},
        "packages": entries,
        "relationships": relations,
        "hasExtractedLicensingInfos": [
            {"licenseId": each, "extractedText": f"as in /usr/share/doc/*/copyright: {each[11:]}"} for each in extracted
        ],
    }


def write_users(to, user, group):
    (to / "etc/passwd").write_text(
        f"root:x:0:0::/nonexistent:/usr/sbin/nologin\nashlar:x:{user}:{group}::/nonexistent:/usr/sbin/nologin\n"
    )
    (to / "etc/group").write_text(f"root:x:0:\nashlar:x:{group}:\n")
    for folder in ("run/ashlar", "var/lib/ashlar"):
        place = to / folder
        place.mkdir(parents=True, exist_ok=True)
        os.chown(place, user, group)
        place.chmod(0o750 if folder.startswith("run") else 0o700)
    for folder in ("tmp", "proc", "sys", "dev"):
        (to / folder).mkdir(exist_ok=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\nusage")[0])
    parser.add_argument("--packages", required=True)
    parser.add_argument("--user", required=True)
    parser.add_argument("--to", required=True, type=pathlib.Path)
    arguments = parser.parse_args()
    to = arguments.to
    to.mkdir(parents=True)
    for link in ("bin", "sbin", "lib", "lib64"):  # as Debian has them
        (to / "usr" / link).mkdir(parents=True, exist_ok=True)
        (to / link).symlink_to(f"usr/{link}")
    packages = closure(arguments.packages.split(","))
    records = to / "var/lib/dpkg/status.d"
    records.mkdir(parents=True)
    for name in packages:
        for path in files(name):
            copy(path, to)
        (records / name).write_text(
            subprocess.run(["dpkg-query", "-s", name], capture_output=True, text=True, check=True).stdout
        )
        (records / f"{name}.md5sums").write_text(checksums(name, to))
    (to / "etc").mkdir(exist_ok=True)
    folders = ["/usr/lib/x86_64-linux-gnu"]
    if UCX.exists():
        shutil.copytree(UCX, to / UCX.relative_to("/"), symlinks=True)
        folders.insert(0, f"{UCX}/lib")
    (to / "etc/ld.so.conf").write_text(
        "".join(f"{folder}\n" for folder in folders if (to / folder.lstrip("/")).exists())
    )
    write_users(to, *(int(word) for word in arguments.user.split(":")))
    subprocess.run(["ldconfig", "-r", to, "-X"], check=True)
    (to / SBOM).parent.mkdir(parents=True, exist_ok=True)
    (to / SBOM).write_text(json.dumps(bill_of_materials(packages), indent=1) + "\n")
    print(f"{len(packages)} packages: {' '.join(packages)}")
    for program in ("/usr/sbin/ashlard", "/usr/bin/ashlarctl"):  # checks that all their libraries are present
        subprocess.run(["chroot", to, program, "--version"], check=True)


if __name__ == "__main__":
    main()
