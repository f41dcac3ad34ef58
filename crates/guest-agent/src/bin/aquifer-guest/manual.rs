//! The sections of the help after its options, in the form of those of `aquifer`.

/// The end of the short help.
pub(crate) const SHORT: &str = "--help shows details, examples and exit codes.";

/// Of `aquifer-guest` itself.
pub(crate) const ALL: &str = "\
Examples:
  Run the agent of this guest:
      aquifer-guest run
  Request 2 GiB before a large job:
      aquifer-guest request +2G

Exit status:
  0  done
  1  failed, or the host did not grant a request in full
  2  misuse: the command line is invalid";

/// Of `aquifer-guest run`.
pub(crate) const RUN: &str = "\
Examples:
  Run the agent; only root may send requests:
      aquifer-guest run
  Let a group send requests too:
      aquifer-guest run --socket-group memory

Exit status:
  1  failed; the agent ends for no other reason
  2  misuse: the command line is invalid";

/// Of `aquifer-guest request`.
pub(crate) const REQUEST: &str = "\
Examples:
  Request 2 GiB before a large job:
      aquifer-guest request +2G --why 'nightly index' && build-index
  Give them back:
      aquifer-guest request -2G

Exit status:
  0  the host granted the whole request
  1  failed, or the host granted only a part or nothing
  2  misuse: the command line is invalid";

/// Of `aquifer-guest show`.
pub(crate) const SHOW: &str = "\
Examples:
  Show them:
      aquifer-guest show
  Print them as JSON:
      aquifer-guest show --json

Exit status:
  0  done
  1  failed: no agent answers
  2  misuse: the command line is invalid";
