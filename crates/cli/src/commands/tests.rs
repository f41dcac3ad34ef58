//! Tests of the command line as a whole.

use std::any::TypeId;
use std::collections::BTreeSet;

use aquifer_page::Bytes;
use clap::error::ErrorKind;

use super::*;

/// Calls `with` for every command and subcommand, with the words that name it.
pub(super) fn each(
    command: &clap::Command,
    words: &[&str],
    with: &mut dyn FnMut(&[&str], &clap::Command),
) {
    for part in command.get_subcommands() {
        let words = [words, &[part.get_name()]].concat();
        with(&words, part);
        each(part, &words, with);
    }
}

#[test]
fn the_command_line_is_sound() {
    command().debug_assert();
}

#[test]
fn every_manual_belongs_to_a_command() {
    let mut named = BTreeSet::new();
    each(&command(), &[], &mut |words, _| _ = named.insert(words.join(" ")));
    for (name, _) in MANUALS {
        assert!(named.contains(*name), "{name}");
        for (part, _) in parts(name) {
            assert!(named.contains(&format!("{name} {part}")), "{name} {part}");
        }
    }
}

#[test]
fn every_command_and_subcommand_has_examples_that_parse() {
    each(&command(), &[], &mut |words, _| {
        let examples = manual(words).examples;
        assert!(!examples.is_empty(), "{words:?} has no examples");
        let own = format!("aquifer {}", words.join(" "));
        assert!(examples.iter().any(|(line, _)| line.contains(&own)), "no example is of {own}");
        for (line, _) in examples.iter().filter(|(line, _)| line.starts_with("aquifer ")) {
            // Replaces the placeholders of examples by values that parse.
            let line = line.replace("uuid:...", &format!("uuid:{}", "0".repeat(8)));
            let line = line.replace("TOKEN", &"A".repeat(86));
            let line = line.replace("NQN", "nqn.2014-08.org.example:a");
            let parsed = command().try_get_matches_from(split(&line));
            assert!(parsed.is_ok(), "{line}: {}", parsed.unwrap_err());
        }
    });
}

#[test]
fn every_command_shows_examples_and_exit_status() {
    let mut whole = command();
    whole.build();
    each(&whole, &[], &mut |words, part| {
        let help = part.clone().render_long_help().to_string();
        let headings: Vec<_> = help.lines().filter(|line| is_heading(line)).collect();
        for section in ["Examples:", "Exit status:"] {
            assert!(headings.contains(&section), "{words:?} lacks {section}");
        }
        let distinct: BTreeSet<_> = headings.iter().collect();
        assert_eq!(distinct.len(), headings.len(), "{words:?} repeats one of {headings:?}");
    });
}

fn is_heading(line: &str) -> bool {
    line.ends_with(':') && !line.starts_with(' ')
}

#[test]
fn positions_are_names_and_never_sizes() {
    each(&command(), &[], &mut |words, part| {
        for position in part.get_positionals() {
            let names = position.get_value_names().unwrap_or_default();
            assert!(names.iter().all(|name| !name.contains("SIZE")), "{words:?} {position:?}");
            let is_size = position.get_value_parser().type_id() == TypeId::of::<Bytes>();
            assert!(!is_size, "{words:?} {position:?}");
        }
    });
}

#[test]
fn the_word_after_a_noun_is_a_verb() {
    const NOUNS: [&str; 5] = ["host", "volume", "region", "vm", "group"];
    const VERBS: [&str; 23] = [
        "adopt", "attach", "borrow", "create", "detach", "drain", "drop", "exec", "forget", "list",
        "migrate", "persist", "recover", "resize", "resume", "return", "rm", "rotate", "set",
        "show", "start", "stop", "undrain",
    ];
    each(&command(), &[], &mut |words, _| {
        let [noun, word] = words else { return };
        let verb = word.split('-').next().unwrap_or(word);
        assert!(
            VERBS.contains(&verb) || !NOUNS.contains(noun),
            "'{word}' of 'aquifer {noun}' is no known verb"
        );
    });
}

#[test]
fn commands_that_set_need_a_value() {
    for line in ["vm set-budget", "region set-limit", "region set-limit --group blue"] {
        let line = format!("aquifer {line}");
        let error = command().try_get_matches_from(line.split(' ')).expect_err(&line);
        assert_eq!(error.kind(), ErrorKind::MissingRequiredArgument, "{line}: {error}");
    }
}

#[test]
fn a_vm_without_a_cache_takes_no_option_of_one() {
    let own = ["policy=sieve", "scheme=on-demand", "prefetch=off", "fault-timeout=1s", "workers=2"];
    let more = ["group=blue", "groups=/x", "tls=/x", "lender-host=b", "unencrypted", "take-over"];
    for option in [&own[..], &more].concat() {
        let given = format!("--{option}");
        let vm = ["aquifer", "vm", "start", "db", "--memory", "1G"];
        let parse = |line: &[&str]| {
            let matches = command().try_get_matches_from(line)?;
            Cli::from_arg_matches(&matches).map(drop)
        };
        let name = option.split('=').next().unwrap_or(option);
        for own in [&["--cache", "none"], &["--huge-pages", "2M"]] {
            let line = [&vm[..], &[&given], own].concat();
            let text = parse(&line).expect_err(option).to_string();
            assert!(text.contains(&format!("--{name} needs a cache")), "{text}");
            assert!(parse(&[&vm[..], own].concat()).is_ok());
        }
        let lender = ["--cache", "1G", "--lender", "nbd+unix:///?socket=/x"];
        assert!(parse(&[&vm[..], &[&given], &lender].concat()).is_ok(), "{option}");
        assert!(parse(&[&vm[..], &[&given]].concat()).is_ok(), "{option}");
    }
}

/// Splits a command line like a shell, up to a pipe or a redirection.
fn split(line: &str) -> Vec<String> {
    let (mut words, mut quoted, mut empty) = (vec![String::new()], false, true);
    for c in line.chars() {
        match c {
            '\'' => (quoted, empty) = (!quoted, false),
            '|' | '>' if !quoted => break,
            ' ' if !quoted && !empty => (empty, _) = (true, words.push(String::new())),
            ' ' if !quoted => {}
            c => {
                empty = false;
                words.last_mut().expect("there is a word").push(c);
            }
        }
    }
    words.truncate(words.len() - usize::from(empty));
    words
}
