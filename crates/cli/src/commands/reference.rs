//! Generates docs/reference/cli.md from the definitions of the command line.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use super::command;

/// The width of the text, in columns.
const WIDTH: usize = 98;

/// Returns the reference: the long help of each command and subcommand.
fn reference() -> String {
    let mut text = "\
# Command line

`UPDATE_REFERENCE=1 cargo test -p aquifer-cli --lib the_reference` generates this page from the
code. `aquifer COMMAND --help` prints the same text, and the options that every command has.
"
    .to_owned();
    let mut whole = command().term_width(WIDTH);
    whole.build();
    add(&mut text, &whole, "aquifer");
    text
}

fn add(text: &mut String, command: &clap::Command, name: &str) {
    let help = command.clone().bin_name(name).term_width(WIDTH).render_long_help().to_string();
    let lines: Vec<_> = help.lines().map(|line| fold(line.trim_end())).collect();
    write!(text, "\n## {name}\n```text\n{}\n```\n", lines.join("\n").trim_end())
        .expect("a String takes all text");
    for part in command.get_subcommands().filter(|part| !part.is_hide_set()) {
        let part = part.clone().mut_args(|option| {
            let is_everywhere = option.is_global_set() || option.get_id() == "help";
            option.hide(is_everywhere)
        });
        add(text, &part, &format!("{name} {}", part.get_name()));
    }
}

/// Breaks a line of usage that is too long, before a choice of options; clap does not.
fn fold(line: &str) -> String {
    match line.get(..WIDTH).and_then(|start| start.rfind(" <--")) {
        Some(at) if line.len() > WIDTH && line.starts_with("Usage:") => {
            format!("{}\n      {}", &line[..at], &line[at..])
        }
        _ => line.to_owned(),
    }
}

#[test]
fn the_reference_is_generated_from_the_code() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/cli.md");
    let text = reference();
    if std::env::var_os("UPDATE_REFERENCE").is_some() {
        fs::write(&path, &text).expect("docs/reference can be written");
    }
    assert!(
        fs::read_to_string(&path).unwrap_or_default() == text,
        "docs/reference/cli.md is old: UPDATE_REFERENCE=1 cargo test -p aquifer-cli --lib \
         the_reference"
    );
}
