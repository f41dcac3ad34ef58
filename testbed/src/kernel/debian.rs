//! Kernel packages from Debian's mirror, fetched with this machine's apt.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::command;

/// Environment variable that names a mirror other than the one of the machine's apt.
const MIRROR_VARIABLE: &str = "DEBIAN_MIRROR";

const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Downloads the newest kernel image of `suite` into `dir`; returns the package's path.
///
/// apt gets sources and state of its own: the machine's may lack the suite, and must not change.
pub(super) fn download(suite: &str, dir: &Path) -> Result<PathBuf> {
    let mirror = mirror()?;
    for inner in ["lists/partial", "archives/partial", "tmp"] {
        fs::create_dir_all(dir.join(inner))?;
    }
    fs::write(
        dir.join("sources.list"),
        format!("deb [signed-by={KEYRING}] {mirror} {suite} main\n"),
    )?;
    let way_out = || {
        format!("is {mirror} a mirror of Debian with {suite}? {MIRROR_VARIABLE}=URI names another")
    };
    command::run(private(dir, "apt-get").arg("update")).with_context(way_out)?;
    let depends =
        command::output(private(dir, "apt-cache").args(["depends", "linux-image-amd64"]))?;
    let depends = depends.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
    let image = depends.into_iter().find(|name| name.starts_with("linux-image-"));
    let image =
        image.with_context(|| format!("{suite} has no kernel image for linux-image-amd64"))?;
    command::run(private(dir, "apt-get").args(["download", image]).current_dir(dir))
        .with_context(way_out)?;
    let package = fs::read_dir(dir)?
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|extension| extension == "deb"));
    package.with_context(|| format!("apt-get download {image} left no package file"))
}

fn private(dir: &Path, tool: &str) -> Command {
    let mut command = Command::new(tool);
    command.env("TMPDIR", dir.join("tmp")).arg("-qq");
    for (option, value) in [
        ("Dir::Etc::SourceList", dir.join("sources.list")),
        ("Dir::Etc::SourceParts", "-".into()),
        ("Dir::State::Lists", dir.join("lists")),
        ("Dir::Cache", dir.to_owned()),
        ("APT::Architectures", "amd64".into()),
        ("APT::Architecture", "amd64".into()),
        ("Acquire::Languages", "none".into()),
        ("APT::Sandbox::User", "root".into()),
    ] {
        command.arg("-o").arg(format!("{option}={}", value.display()));
    }
    command
}

/// Returns the mirror from [`MIRROR_VARIABLE`] or else from this machine's apt.
fn mirror() -> Result<String> {
    if let Ok(mirror) = std::env::var(MIRROR_VARIABLE) {
        return Ok(mirror);
    }
    let mut apt = Command::new("apt-get");
    let targets = command::output(apt.args([
        "indextargets",
        "--format",
        "$(LABEL) $(REPO_URI)",
        "Created-By: Packages",
    ]))?;
    match choose(&targets) {
        Some(mirror) => Ok(mirror.to_owned()),
        None => bail!("apt has no mirror of Debian here: set {MIRROR_VARIABLE}=URI"),
    }
}

/// Chooses the repository with Debian's label. Before apt's first update no repository has a label,
/// so the usual path decides.
fn choose(targets: &str) -> Option<&str> {
    let labelled = targets.lines().find_map(|line| line.strip_prefix("Debian "));
    let is_usual = |uri: &&str| uri.trim_end_matches('/').ends_with("/debian");
    labelled
        .or_else(|| targets.lines().filter_map(|line| line.split(' ').next_back()).find(is_usual))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mirror_is_the_one_of_this_machines_apt() {
        let targets =
            "Debian-Security http://a.example/debian-security/\nDebian http://b.example/pub/\n";
        assert_eq!(choose(targets), Some("http://b.example/pub/"));
        let never_updated =
            " http://a.example/debian-security/\n http://b.example/debian/\n http://c.example/x/\n";
        assert_eq!(choose(never_updated), Some("http://b.example/debian/"));
        assert_eq!(choose("Ubuntu http://a.example/ubuntu/\n"), None);
    }
}
