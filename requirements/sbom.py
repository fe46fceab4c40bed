"""Writes a bill of materials of a release: all that a lock holds, as CycloneDX JSON.

python requirements/sbom.py base >sbom.json
"""

from __future__ import annotations

import sys
import tomllib

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense
from cyclonedx.output.json import JsonV1Dot6
from lock import LOCKS, ROOT, packages
from packageurl import PackageURL


def bill(lock: str) -> Bom:
    """This project's bill of materials; each component has the hashes of all files of its version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bom = Bom()
    bom.metadata.component = whole = Component(
        type=ComponentType.APPLICATION,
        name=project["name"],
        version=project["version"],
        bom_ref=project["name"],
        licenses=[DisjunctiveLicense(id=project["license"])],
        purl=PackageURL("pypi", None, project["name"], project["version"]),
    )
    parts = []
    for package in packages(lock):
        part = Component(
            type=ComponentType.LIBRARY,
            name=package.name,
            version=package.version,
            bom_ref=f"{package.name}=={package.version}",
            purl=PackageURL("pypi", None, package.name, package.version),
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest) for digest in package.hashes],
            properties=[Property(name="epd-serve:marker", value=package.marker)] if package.marker else [],
        )
        bom.components.add(part)
        parts.append(part)
    bom.register_dependency(whole, parts)
    return bom


def main() -> None:
    if sys.argv[1:] not in [[name] for name in LOCKS]:
        raise SystemExit(f"usage: python requirements/sbom.py {'|'.join(LOCKS)} >sbom.json")
    print(JsonV1Dot6(bill(sys.argv[1])).output_as_string(indent=2))


if __name__ == "__main__":
    main()
