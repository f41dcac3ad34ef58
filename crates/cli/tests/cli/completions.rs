//! Tests of completions: bash asks the program how a line can go on.

use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::Command;

use crate::common::{aquifer, stderr, stdout};

/// Sources the script, then calls the function that it registers as bash does for a tab.
const AS_BASH: &str = r#"
source <(aquifer completions bash) || exit
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMP_TYPE=9
_clap_complete_aquifer aquifer "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\n' "${COMPREPLY[@]}"
"#;

/// Returns how bash completes the last word of a line, which may be empty.
fn completed(dir: &Path, line: &str) -> Vec<String> {
    let binary = Path::new(env!("CARGO_BIN_EXE_aquifer")).parent().unwrap();
    let mut path = OsString::from(binary);
    path.push(":");
    path.push(std::env::var_os("PATH").unwrap_or_default());
    let mut bash = Command::new("bash");
    bash.args(["--norc", "-c", AS_BASH, "bash"]).args(line.split(' ')).env("PATH", path);
    bash.env("AQUIFER_RUN_DIR", dir).env("AQUIFER_GROUPS", dir.join("groups"));
    let output = bash.output().unwrap();
    assert!(output.status.success(), "{line}: {}", stderr(&output));
    stdout(&output).lines().filter(|line| !line.starts_with('-')).map(str::to_owned).collect()
}

#[test]
fn bash_completes_commands_and_none_that_is_hidden() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(completed(dir.path(), "aquifer vm sh"), ["show", "show-budget"]);
    let of_host = ["borrow", "return", "rotate-keys", "drain", "undrain"];
    assert_eq!(completed(dir.path(), "aquifer host "), of_host);
    let served = ["agent", "export", "dedup", "reprovision", "disk-cache", "vm-balancer"];
    assert_eq!(completed(dir.path(), "aquifer serve "), served);
    assert_eq!(completed(dir.path(), "aquifer loa"), [""]);
    assert_eq!(completed(dir.path(), "aquifer vm start db --accel t"), ["tcg"]);
}

#[test]
fn bash_completes_the_names_that_this_host_has() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let mut create = aquifer(dir.path());
    create.args(["group", "create", "blue", "--groups"]).arg(path("groups"));
    let created = create.output().unwrap();
    assert!(created.status.success(), "{}", stderr(&created));
    for vm in ["db", "web"] {
        fs::create_dir_all(path("vms").join(vm)).unwrap();
    }
    fs::create_dir_all(path("regions/.items")).unwrap();
    fs::write(path("regions/.items/record.json"), "").unwrap();
    let volume = "0123456789abcdef0123456789abcdef";
    fs::create_dir(path("volumes")).unwrap();
    fs::write(path("volumes").join(format!("{volume}.json")), "").unwrap();
    fs::write(path("export.sock"), "").unwrap();

    let check = |line: &str, names: &[&str]| assert_eq!(completed(dir.path(), line), names);
    check("aquifer vm stop ", &["db", "web"]);
    check("aquifer vm resize d", &["db"]);
    check("aquifer region rm ", &["items"]);
    check("aquifer region exec --heap i", &["items"]);
    check("aquifer group show ", &["blue"]);
    check("aquifer serve dedup b", &["blue"]);
    check("aquifer vm start new --group ", &["blue"]);
    check("aquifer volume detach ", &[volume]);
    check("aquifer host return --volume 0", &[volume]);
    let socket = format!("nbd+unix:///?socket={}", path("export.sock").display());
    check("aquifer volume attach ", &[&socket]);
    check("aquifer run --lender ", &[&socket]);
    check("aquifer --run-dir /nowhere vm stop ", &[]);
}

#[test]
fn a_shells_variable_does_not_turn_a_worker_into_a_completer() {
    let dir = tempfile::tempdir().unwrap();
    let mut worker = aquifer(dir.path());
    let output = worker.args(["serve", "region"]).env("AQUIFER_COMPLETE", "bash").output().unwrap();
    assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(2), ""));
}
