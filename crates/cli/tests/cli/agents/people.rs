//! Tests of people besides root at the agent's unix socket. None of these tests swaps.

use std::fs::{self, Permissions};
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Stdio};

use aquifer_api::path;

use super::framework::{Cluster, Host, Identity, Spec, lacks_rights};

/// Sends a request over a unix socket; prints the status and the body of the answer.
const ASK: &str = r#"
import socket, sys
path, method, where, body = sys.argv[1:]
s = socket.socket(socket.AF_UNIX)
s.settimeout(60)
s.connect(path)
head = f"{method} {where} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"
head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
s.sendall((head + body).encode())
heard = b""
while some := s.recv(65536): heard += some
head, _, body = heard.decode().partition("\r\n\r\n")
print(head.split(" ")[1], body)
"#;

/// Opens many connections to a unix socket, each with a request that never ends; says so, and keeps
/// them until its input ends.
const CROWD: &str = r#"
import socket, sys
kept = []
for _ in range(300):
    s = socket.socket(socket.AF_UNIX)
    s.connect(sys.argv[1])
    try: s.sendall(b"POST /v1/return HTTP/1.1\r\nhost: a\r\ncontent-length: 10\r\n\r\n")
    except OSError: pass
    kept.append(s)
print("open", flush=True)
sys.stdin.read()
"#;

/// Returns the command that runs this Python as the user 'nobody' with these supplementary groups,
/// for the host's socket.
fn as_nobody(host: &Host, groups: &str, python: &str) -> Command {
    let mut command = Command::new("setpriv");
    // A Python of root's home is not for others.
    command.env("PATH", "/usr/local/bin:/usr/bin:/bin");
    command.args(["--reuid=65534", "--regid=65534"]);
    match groups {
        "" => command.arg("--clear-groups"),
        groups => command.arg(format!("--groups={groups}")),
    };
    command.args(["python3", "-c", python]).arg(host.socket());
    command
}

/// Asks the host's agent as the user 'nobody' with these supplementary groups.
fn ask(host: &Host, groups: &str, (method, path, body): (&str, &str, &str)) -> (u16, String) {
    let output = as_nobody(host, groups, ASK).args([method, path, body]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    let (status, body) = text.split_once(' ').unwrap_or_else(|| panic!("{error}"));
    (status.parse().unwrap(), body.to_owned())
}

/// Lets others than root look for the directory of the host's socket, which the agent opens.
fn open_directories(cluster: &Cluster, host: &Host) {
    for dir in [cluster.dir(), host.dir()] {
        fs::set_permissions(dir, Permissions::from_mode(0o755)).unwrap();
    }
}

#[test]
fn a_persons_groups_decide_what_they_may_do() {
    if lacks_rights() {
        return;
    }
    // The first groups of every Linux system.
    let spec =
        Spec::new("a").set("access", "read", vec!["daemon"]).set("access", "operate", vec!["bin"]);
    let cluster = Cluster::created(spec);
    let a = &cluster["a"];
    open_directories(&cluster, a);
    let (daemon, bin) = ("1", "2");
    let status = ("GET", path::STATUS, "");
    let give_back = ("POST", path::RETURN, "{}");
    let forget = ("POST", path::FORGET, "{\"host\":\"b\"}");
    for (groups, request, code, said) in [
        ("", status, 403, "needs the role 'read', and user 65534 has no role"),
        (daemon, status, 200, "\"host\":\"a\""),
        (daemon, give_back, 403, "needs the role 'operate', and user 65534 has 'read'"),
        (daemon, give_back, 403, "member of the group bin"),
        (bin, status, 200, "\"host\":\"a\""),
        (bin, forget, 403, "needs the role 'admin', and user 65534 has 'operate'"),
        (bin, forget, 403, "[access] admin"),
        ("1,2", forget, 403, "run this as root"),
    ] {
        let (found, body) = ask(a, groups, request);
        assert!(found == code && body.contains(said), "{groups} {request:?}: {found} {body}");
    }
    let (found, body) = ask(a, bin, give_back);
    assert!(found != 403, "{found} {body}");
    assert_eq!(a.status().host.as_str(), "a", "root may all");
}

#[test]
fn no_crowd_of_users_keeps_root_or_a_peer_out() {
    if lacks_rights() {
        return;
    }
    let mut cluster = Cluster::created(Spec::new("a").set("access", "read", vec!["daemon"]));
    cluster.join("b");
    let (a, b) = (&cluster["a"], &cluster["b"]);
    open_directories(&cluster, a);
    for groups in ["", "1"] {
        let mut crowd = as_nobody(a, groups, CROWD);
        let mut crowd = crowd.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(crowd.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "open\n", "{groups}");
        // The agent has accepted all those connections before this one.
        assert_eq!(a.status().host.as_str(), "a", "{groups}");
        assert_eq!(Identity::load(&b.tls()).get(a, path::OFFER).unwrap()["host"], "a", "{groups}");
        drop(crowd.stdin.take());
        assert!(crowd.wait().unwrap().success());
    }
}

#[test]
fn without_roles_the_socket_is_for_root_alone() {
    if lacks_rights() {
        return;
    }
    let cluster = Cluster::created("a");
    let mode = fs::metadata(cluster["a"].socket()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}
