from kvd.cli.main import main

main()
