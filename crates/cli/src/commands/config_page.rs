//! The reference of the agent's configuration, as the man page aquifer.toml(5) and in docs.

use std::io;

use aquifer_agent::config_reference::{Key, SECTIONS, Section};

use crate::manual::roff;

/// What the file is, in Markdown.
const INTRO: &[&str] = &[
    "The agent reads `/etc/aquifer/agent.toml` (`aquifer serve agent --config FILE` names \
     another). `aquifer cluster create` and `join` write a commented file with most of these keys \
     and their defaults. The agent refuses a file with unknown keys, and names them.",
    "`aquifer serve agent --check` examines all that the file names: certificate, cgroup, \
     addresses, directories, peers, groups. It lists each fault and changes nothing. The exit \
     status is 1 if an agent could not work with the file.",
    "The agent reads the file only when it starts. SIGHUP changes nothing, and the log says so.",
    "Sizes are `4096`, `\"512MiB\"` or `\"2G\"` (powers of 1024); times are `\"500ms\"`, `\"8s\"` \
     or `\"10m\"`. A share is a number such as 0.8.",
];

/// Variables of all commands, and their meaning in Markdown.
const ENVIRONMENT: &[(&str, &str)] = &[
    (
        "AQUIFER_LOG",
        "how much all processes log, `info` by default: `debug`, `info,aquifer_agent=debug`",
    ),
    ("AQUIFER_RUN_DIR", "same as `--run-dir`, default `/run/aquifer`"),
    (
        "AQUIFER_SOCKET",
        "same as `--socket` of commands that call the agent, default `RUN_DIR/agent.sock`",
    ),
    ("AQUIFER_VM_DIR", "same as `--vm-dir`, default `/var/lib/aquifer/vms`"),
    ("AQUIFER_GROUPS", "same as `--groups`, default `/etc/aquifer/groups`"),
];

/// Writes the man page.
///
/// # Errors
/// If `out` cannot be written.
pub(super) fn write(out: &mut dyn io::Write) -> io::Result<()> {
    let version = env!("CARGO_PKG_VERSION");
    writeln!(out, ".TH AQUIFER.TOML 5 \"\" \"aquifer {version}\" \"Aquifer\"")?;
    writeln!(out, ".SH NAME\naquifer.toml \\- configuration of Aquifer's agent")?;
    writeln!(out, ".SH DESCRIPTION")?;
    paragraphs(out, INTRO)?;
    for section in SECTIONS {
        writeln!(out, ".SH {}", roff(&title(section).to_uppercase()))?;
        for Key { name, kind, default, meaning } in section.keys {
            let default =
                default.map_or(String::new(), |default| format!(", default {}", roff(default)));
            writeln!(out, ".TP\n\\fB{}\\fR ({}{default})", roff(name), plain(kind))?;
            writeln!(out, "{}", plain(meaning))?;
        }
        paragraphs(out, section.notes)?;
    }
    writeln!(out, ".SH ENVIRONMENT")?;
    for (name, meaning) in ENVIRONMENT {
        writeln!(out, ".TP\n\\fB{}\\fR\n{}", roff(name), plain(meaning))?;
    }
    writeln!(out, ".SH FILES\n/etc/aquifer/agent.toml")?;
    writeln!(out, ".SH SEE ALSO\naquifer\\-serve\\-agent(1), aquifer\\-cluster\\-init(1)")
}

fn paragraphs(out: &mut dyn io::Write, all: &[&str]) -> io::Result<()> {
    all.iter().try_for_each(|text| writeln!(out, ".PP\n{}", plain(text)))
}

/// Returns the heading of a section.
fn title(section: &Section) -> String {
    if section.name.is_empty() { "Host".to_owned() } else { format!("[{}]", section.name) }
}

/// Returns Markdown as text for troff: without marks, and with the text of links only.
fn plain(markdown: &str) -> String {
    let mut text = markdown.replace(['`', '*'], "");
    while let Some((before, rest)) = text.split_once("](") {
        let (_, after) = rest.split_once(')').unwrap_or_default();
        let (start, link) = before.rsplit_once('[').unwrap_or_default();
        text = format!("{start}{link}{after}");
    }
    roff(&text)
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;
    use std::fs;
    use std::path::Path;

    use super::*;
    use crate::manual::fold;

    const HEAD: &str = "\
# Configuration

`UPDATE_REFERENCE=1 cargo test -p aquifer-cli --lib the_reference` generates this page from the
code. `aquifer man` writes the same as the man page aquifer.toml(5).

";

    const TAIL: &str = "
These pages write `RUN_DIR` for the directory of `--run-dir`.

## What `volume attach --direct` sets in the kernel
| parameter | value | why |
|---|---|---|
| `ctrl_loss_tmo` | -1, never | after the kernel's 600 s, the kernel would remove device and pages |
| `reconnect_delay` | 1 s | the pages are back a second after the lender |
| `keep_alive_tmo` | 15 s | time to notice a silent lender |
| `fast_io_fail_tmo` | `--io-timeout`, 8 s | from then on I/O fails instead of waiting |
| queues | one per processor, at most 4 | each needs buffers, which a swapping host must find |

With the kernel's default `ctrl_loss_tmo`, swapped-out pages are lost even if the lender comes back.
With the kernel's default `keep_alive_tmo` of 5 s, a lender can take a host that swaps hard for
dead. If a read fails, the program that needs the page gets SIGBUS. If a write fails, the page stays
in RAM. I/O works again when the lender does.
";

    fn folded(text: &mut String, paragraphs: &[&str]) {
        let all: Vec<_> = paragraphs
            .iter()
            .map(|paragraph| fold(paragraph, 100).collect::<Vec<_>>().join("\n") + "\n")
            .collect();
        text.push_str(&all.join("\n"));
    }

    /// Returns the page of docs/reference.
    fn page() -> String {
        let mut text = HEAD.to_owned();
        folded(&mut text, INTRO);
        for section in SECTIONS {
            let title = match section.name {
                "" => title(section),
                _ => format!("`{}`", title(section)),
            };
            let head = "| key | type | default | meaning |\n|---|---|---|---|";
            writeln!(text, "\n## {title}\n{head}").unwrap();
            for Key { name, kind, default, meaning } in section.keys {
                let default = default.map_or(String::new(), |default| format!("`{default}`"));
                writeln!(text, "| `{name}` | {kind} | {default} | {meaning} |").unwrap();
            }
            if !section.notes.is_empty() {
                text.push('\n');
                folded(&mut text, section.notes);
            }
        }
        writeln!(text, "\n## Environment\n| variable | meaning |\n|---|---|").unwrap();
        for (name, meaning) in ENVIRONMENT {
            writeln!(text, "| `{name}` | {meaning} |").unwrap();
        }
        text + TAIL
    }

    #[test]
    fn the_reference_of_the_configuration_is_generated() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/config.md");
        let text = page();
        if std::env::var_os("UPDATE_REFERENCE").is_some() {
            fs::write(&path, &text).unwrap();
        }
        assert!(
            fs::read_to_string(&path).unwrap_or_default() == text,
            "docs/reference/config.md is old: UPDATE_REFERENCE=1 cargo test -p aquifer-cli --lib \
             the_reference"
        );
    }

    #[test]
    fn markdown_leaves_no_marks_in_the_man_page() {
        assert_eq!(plain("**A.** [B](c.md#d) is `e-f`."), "A. B is e\\-f.");
        assert_eq!(plain("`[lend]` of [Ge23]"), "[lend] of [Ge23]");
        let mut page = Vec::new();
        write(&mut page).unwrap();
        let page = String::from_utf8(page).unwrap();
        assert!(!page.contains('`') && !page.contains("]("), "{page}");
    }
}
