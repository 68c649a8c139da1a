"""The generated block of docs/findings.md: what each code of `attnreg check` means."""

from __future__ import annotations

from attnreg.analysis.check.codes import codes


def codes_block() -> str:
    """A section for each code, below the title of its group."""
    out: list[str] = []
    group = ""
    for code in codes().values():
        if code.group != group:
            group = code.group
            out.append(f"## {group}")
        subject = f" Subject: {', '.join(code.of)}." if code.of else ""
        out.append(f"### {code.name}")
        out.append(f"{code.says}{subject}")
        out.append(f"Why it matters: {code.matters}")
        out.append(f"To mend it: {code.mend}")
        out.append(f"```text\n{code.example}\n```")
    return "\n\n".join(out)
