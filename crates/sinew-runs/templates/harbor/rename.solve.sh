#!/bin/sh
mv draft.txt final.txt
