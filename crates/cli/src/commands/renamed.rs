//! The former names of commands: an error for one of them names the present one.

use std::ffi::OsString;

use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};

/// Former names, and the commands that took their place.
const RENAMED: &[(&str, &str)] = &[
    ("agent", "serve agent"),
    ("export", "serve export"),
    ("attach", "volume attach"),
    ("detach", "volume detach"),
    ("borrow", "host borrow"),
    ("return", "host return"),
    ("drain", "host drain"),
    ("init", "cluster init"),
    ("group scan", "serve dedup"),
    ("group balance", "serve reprovision"),
    ("group cache", "serve disk-cache"),
    ("vm balance", "serve vm-balancer"),
    ("vm budget", "vm set-budget"),
    ("region limit", "region set-limit"),
    ("region pages", "region show-pages"),
    ("region resize-cache", "region resize"),
];

/// Adds the present name to an error about a former one.
pub(super) fn hint(mut error: clap::Error, line: &[OsString]) -> clap::Error {
    let Some(now) = present_name(&error, line) else { return error };
    let tip = StyledStr::from(format!("this command is 'aquifer {now}'"));
    error.remove(ContextKind::SuggestedSubcommand);
    error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip]));
    error
}

/// Returns the present name if the error is about a former one.
fn present_name(error: &clap::Error, line: &[OsString]) -> Option<&'static str> {
    let unknown = match error.get(ContextKind::InvalidSubcommand)? {
        ContextValue::String(unknown) if error.kind() == ErrorKind::InvalidSubcommand => unknown,
        _ => return None,
    };
    let is_former = |former: &str| {
        let mut words = former.split(' ');
        words.next_back() == Some(unknown) && words.all(|word| line.iter().any(|has| has == word))
    };
    RENAMED.iter().find(|(former, _)| is_former(former)).map(|(_, now)| *now)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::command;

    #[test]
    fn an_error_for_a_former_name_names_the_present_one() {
        for (former, now) in RENAMED {
            for more in ["", " --json", " 4G"] {
                let line: Vec<OsString> = format!("aquifer --run-dir /x {former}{more}")
                    .split(' ')
                    .map(OsString::from)
                    .collect();
                let error = command().try_get_matches_from(&line).expect_err(former);
                let text = hint(error, &line).to_string();
                assert!(text.contains(&format!("this command is 'aquifer {now}'")), "{text}");
                assert!(!text.contains("similar"), "{text}");
            }
            let line = format!("aquifer {now} --help");
            let help = command().try_get_matches_from(line.split(' ')).expect_err(now);
            assert_eq!(help.kind(), ErrorKind::DisplayHelp, "{now} is no command");
        }
    }

    #[test]
    fn other_errors_stay_as_they_are() {
        for line in ["aquifer borow", "aquifer vm scan", "aquifer vm --balance"] {
            let line: Vec<_> = line.split(' ').map(OsString::from).collect();
            let error = command().try_get_matches_from(&line).expect_err("it is invalid");
            assert!(!hint(error, &line).to_string().contains("this command is"), "{line:?}");
        }
    }
}
