//! Tests of lenders that come back empty at the same address, under a region and under a volume.

use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::os::unix::process::ExitStatusExt as _;

use rustix::process::Signal;
use serde_json::Value;

use super::framework::{Setting, kill};
use crate::common::{Export, init_two, lacks_devices, serve, stderr, stdout, wait_until};

/// The way to reach a lender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Unix,
    Tcp,
    Tls,
    Nvme,
}

/// A lender that can be restarted, empty, at its address.
struct RestartableLender<'a> {
    way: Way,
    setting: &'a Setting,
    export: Export,
    /// Its URI, and the options that go with it.
    words: Vec<String>,
}

impl<'a> RestartableLender<'a> {
    fn start(setting: &'a Setting, way: Way) -> Self {
        let dir = setting.dir.path();
        let cluster = dir.join("cluster");
        if way == Way::Tls {
            init_two(&cluster);
        }
        let address = match way {
            Way::Unix => format!("unix:{}", dir.join("forgetful").display()),
            _ => "127.0.0.1:0".to_owned(),
        };
        let export = Self::serve(setting, way, &address);
        let mut words = match way {
            Way::Nvme => {
                let (at, nqn) =
                    (&export.ready["nvme"]["addresses"][0], &export.ready["nvme"]["nqn"]);
                vec![format!("nvme+tcp://{}/{}", at.as_str().unwrap(), nqn.as_str().unwrap())]
            }
            _ => vec![export.uri().to_owned()],
        };
        if way == Way::Tls {
            let tls = cluster.join("b/tls").display().to_string();
            words.extend(["--tls".to_owned(), tls, "--lender-host".to_owned(), "a".to_owned()]);
        }
        Self { way, setting, export, words }
    }

    fn serve(setting: &Setting, way: Way, address: &str) -> Export {
        let tls = setting.dir.path().join("cluster/a/tls").display().to_string();
        let listens = if way == Way::Nvme { "--nvme" } else { "--nbd" };
        let mut words = vec!["128M", listens, address];
        if way == Way::Tls {
            words.extend(["--tls", &tls]);
        }
        serve(setting.dir.path(), &words)
    }

    /// Restarts the lender empty, as after a reboot of its host.
    fn comes_back_empty(&mut self) {
        self.export.end(Signal::KILL).unwrap();
        let address = match self.way {
            Way::Unix => format!("unix:{}", self.setting.dir.path().join("forgetful").display()),
            Way::Nvme => self.export.ready["nvme"]["addresses"][0].as_str().unwrap().to_owned(),
            Way::Tcp | Way::Tls => {
                let uri = self.export.uri();
                uri.split_once("://").unwrap().1.trim_end_matches('/').to_owned()
            }
        };
        self.export = Self::serve(self.setting, self.way, &address);
    }
}

#[test]
fn no_program_sees_zeroes_where_a_lender_forgot_its_pages() {
    let Some(setting) = Setting::new() else { return };
    for way in [Way::Unix, Way::Tcp, Way::Tls, Way::Nvme] {
        let mut lender = RestartableLender::start(&setting, way);
        let words =
            ["region", "create", "held", "--size", "32M", "--cache", "8M", "--fault-timeout", "2s"];
        let more: Vec<_> = ["--prefetch", "off", "--lender"].into_iter().collect();
        let uri: Vec<_> = lender.words.iter().map(String::as_str).collect();
        let created = setting.done(&[&words[..], &more, &uri].concat());
        let region = std::path::PathBuf::from(created["file"].as_str().unwrap());
        let mut program = setting.start(&region);
        program.does("write 6");
        setting.done(&["region", "persist", "held"]);
        lender.comes_back_empty();
        // The program must die of SIGBUS: any answer would be a claim about lost memory.
        program.order("check 6");
        let end = program.child.wait().unwrap();
        assert_eq!(end.signal(), Some(7), "{way:?}: {end}");
        assert_lease_is_lost(&setting, way);
        // The next engine must not believe the lender either.
        kill(&setting.show("held")["pid"]);
        wait_until("another engine serves the region", || {
            setting.aquifer(&["region", "show", "held"]).status.success()
        });
        let mut program = setting.start(&region);
        program.order("check 6");
        let end = program.child.wait().unwrap();
        assert_eq!(end.signal(), Some(7), "{way:?}, another engine: {end}");
        assert_lease_is_lost(&setting, way);
        wait_until("the region is removed", || {
            setting.aquifer(&["region", "rm", "held"]).status.success()
        });
    }
}

/// Asserts that the status shows the lease as lost.
fn assert_lease_is_lost(setting: &Setting, way: Way) {
    wait_until("the status shows the lease as lost", || {
        setting.show("held")["volume"]["leases"][0]["state"] == "lost"
    });
    let shown = setting.show("held");
    let (lease, error) = (&shown["volume"]["leases"][0]["lease"], &shown["volume"]["last_error"]);
    let error = error.as_str().unwrap();
    assert!(
        error.contains("lender ") && error.contains(lease.as_str().unwrap()),
        "{way:?}: {error}"
    );
    assert!(stdout(&setting.aquifer(&["region", "show", "held"])).contains("lost"));
}

#[test]
fn no_block_reads_as_zeroes_where_a_lender_forgot_it() {
    let Some(setting) = Setting::new().filter(|_| !lacks_devices()) else { return };
    for way in [Way::Unix, Way::Tcp, Way::Tls, Way::Nvme] {
        let mut lender = RestartableLender::start(&setting, way);
        let uri: Vec<_> = lender.words.iter().map(String::as_str).collect();
        let attached: Value = setting.done(&[&["volume", "attach"][..], &uri].concat());
        let device = attached["device"].as_str().unwrap();
        let written = [7; 1 << 20];
        let block = OpenOptions::new().write(true).open(device).unwrap();
        block.write_all_at(&written, 0).unwrap();
        block.sync_all().unwrap();
        drop(block);
        lender.comes_back_empty();
        // O_DIRECT, as swap reads: the page cache may still have the pages.
        let direct =
            OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(device).unwrap();
        let mut pages = vec![0; (64 << 12) + 4096];
        let aligned = pages.as_ptr().align_offset(4096);
        for page in 0..64 {
            let read = direct.read_at(&mut pages[aligned..][..4096], page * 4096);
            assert!(read.is_err(), "{way:?}: page {page} was readable");
        }
        drop(direct);
        let volume = attached["volume"].as_str().unwrap();
        let log = setting.dir.path().join(format!("volumes/{volume}.log"));
        let log = std::fs::read_to_string(log).unwrap();
        assert!(log.contains("lost: ") && log.contains("lender "), "{way:?}: {log}");
        let gone = setting.aquifer(&["volume", "detach", "--force", volume]);
        assert!(gone.status.success(), "{}", stderr(&gone));
    }
}
