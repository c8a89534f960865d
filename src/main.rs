//! The `gradscale` program: parse, run, exit code.

fn main() -> std::process::ExitCode {
    gradscale::cli::main()
}
